"""Attention of prompts: every ISA x dtype x shape against float64; and the same bits however it is cut and batched."""

from functools import lru_cache

import pytest
import torch

from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.shapes import LayerShape
from tests.support.attention_cases import expected, make_batch, shape

LENGTHS = (1, 2, 17, 63, 64, 65, 130, 300)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


SHAPES = {
    "mha64": shape(2, 64, 1),
    "mha80": shape(2, 80, 1),
    "gqa4_128": shape(2, 128, 4),
    "gqa8_64": shape(1, 64, 8),
    "gqa3_112_window": shape(1, 112, 3, window=64),
    "gqa5_192": shape(1, 192, 5),
    "gqa2_256_softcap": shape(1, 256, 2, softcap=30.0),
    "gqa6_33_window": shape(2, 33, 6, window=50),
    "gqa4_33_chunks": shape(2, 33, 4, window=50, chunked=True),
    "window1": shape(1, 16, 2, window=1),
    "gqa16_64_sinks_window": shape(1, 64, 16, window=128, sinks=True),
    "gqa12_48_sinks": shape(1, 48, 12, sinks=True),
    "mla": shape(3, 192, 1, v_dim=128),
    "tiny": shape(3, 1, 1),
    "k7_v130": shape(2, 7, 3, v_dim=130),
    "group100": shape(1, 8, 100),
    "latent": shape(1, 72, 20, v_dim=64, latent=True),
}


@lru_cache(maxsize=2)
def case(name, dtype):
    batch = make_batch(SHAPES[name], LENGTHS, LENGTHS, DTYPES[dtype])
    return batch, expected(batch, dtype)


def cut(length, every):
    """(start, count) of chunks of `every` tokens."""
    return [(start, min(every, length - start)) for start in range(0, length, every)]


def attend(batch, dtype, *, which=None, every=1 << 30, **options):
    """Output rows of the sequences `which`; in every call each gets its next `every` tokens."""
    s = batch.shape
    which = list(range(len(batch.rows)) if which is None else which)
    prompts = CpuPromptAttention([s], dtype=dtype, **options)
    chunks = {i: cut(batch.lengths[i], every) for i in which}
    packed = {i: torch.full((prompts.packed_bytes(0, batch.lengths[i]),), 255, dtype=torch.uint8) for i in which}
    out = {i: torch.full((batch.lengths[i], s.out_columns), float("nan"), dtype=DTYPES[dtype]) for i in which}
    for call in range(max(map(len, chunks.values()))):
        now = [(i, *chunks[i][call]) for i in which if call < len(chunks[i])]
        rows = torch.cat([batch.rows[i][start : start + count] for i, start, count in now])
        q, k, v = rows.split([s.q_columns, s.k_columns, s.v_columns], dim=1)
        wide = torch.full((len(rows), s.out_columns + 3), float("nan"), dtype=DTYPES[dtype])
        starts, counts = [start for _, start, _ in now], [count for _, _, count in now]
        memory = [packed[i] for i, _, _ in now]
        prompts.attend(0, memory, starts, counts, q, k, v, wide[:, : s.out_columns], batch.sinks)
        assert wide[:, s.out_columns :].isnan().all(), "wrote past the end of a row"
        for (i, start, count), o in zip(now, wide[:, : s.out_columns].split(counts), strict=True):
            out[i][start : start + count] = o
    return torch.cat([out[i] for i in which])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_matches_float64(name, dtype, isa):
    """float32: only arithmetic differs. bfloat16: queries, keys and values are exact, weights and results rounded."""
    batch, answer = case(name, dtype)
    out = attend(batch, dtype, every=100).double()
    scale = max(r.abs().max().item() for r in batch.rows)
    if dtype == "float32":
        assert (out - answer).abs().max() <= 1e-5 * scale
    else:
        assert ((out - answer).abs() <= 2**-8 * answer.abs() + 2e-3 * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(dtype, isa):
    """Scores that grow along the prompt, and then fall: the reference exponent must follow, and small ones vanish."""
    s = LayerShape(1, 16, 16, 2, 1.0)
    batch = make_batch(s, [400], [400], DTYPES[dtype])
    k = batch.rows[0][:, s.q_columns :][:, :16]
    k *= torch.cat((torch.linspace(0.1, 40, 300), torch.linspace(40, 0.1, 100)))[:, None].to(k.dtype)
    error = (attend(batch, dtype).double() - expected(batch, dtype)).abs().max().item()
    assert error <= (1e-4 if dtype == "float32" else 4e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_come_out_exactly(dtype, isa):
    """Weights sum to one even where they are rounded."""
    s = SHAPES["gqa8_64"]
    batch = make_batch(s, [300], [300], DTYPES[dtype])
    batch.rows[0][:, -s.v_dim :] = 1.0
    assert (attend(batch, dtype).float() - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gqa4_128", "gqa6_33_window", "gqa16_64_sinks_window", "mla", "group100"])
def test_same_bits_however_cut_batched_and_threaded(name, dtype, isa):
    batch, _ = case(name, dtype)
    whole = attend(batch, dtype)
    for every, threads in ((1 << 30, 3), (64, 1), (100, 2), (7, 2), (1, 1)):
        again = attend(batch, dtype, every=every, threads=threads)
        assert torch.equal(whole, again), f"chunks of {every} on {threads} threads"
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    order = [6, 3, 0, 7, 5, 2, 4, 1]
    rows = torch.cat([whole[starts[i] : starts[i + 1]] for i in order])
    assert torch.equal(rows, attend(batch, dtype, which=order, threads=2))
    assert torch.equal(whole[starts[6] : starts[7]], attend(batch, dtype, which=[6]))


@pytest.mark.parametrize("skipped_queries", ["few", "most", "all"])
def test_skipped_queries_rows_are_left_alone(skipped_queries, isa):
    """And their keys and values count for those that follow."""
    batch, _ = case("gqa6_33_window", "float32")
    s, whole = batch.shape, attend(batch, "float32")
    skipped = [
        {"few": min(n, 7), "most": n - 1, "all": n if i % 2 else 0}[skipped_queries] for i, n in enumerate(LENGTHS)
    ]
    prompts = CpuPromptAttention([s], dtype="float32", threads=2)
    packed = [torch.zeros(prompts.packed_bytes(0, n), dtype=torch.uint8) for n in LENGTHS]
    q, k, v = torch.cat(batch.rows).split([s.q_columns, s.kv_heads * s.k_dim, s.kv_heads * s.v_dim], dim=1)
    out = torch.full((len(q), s.out_columns), float("nan"))
    prompts.attend(0, packed, [0] * len(LENGTHS), LENGTHS, q, k, v, out, batch.sinks, skipped)
    for got, want, skip in zip(out.split(LENGTHS), whole.split(LENGTHS), skipped, strict=True):
        assert got[:skip].isnan().all() and torch.equal(got[skip:], want[skip:])


def test_runs_on_the_threads_of_a_store():
    s = SHAPES["gqa8_64"]
    store = open_kv_cache([s], kv_dtype="float32", capacity_tokens=64, max_sequences=1, threads=3)
    batch, _ = case("gqa8_64", "float32")
    assert CpuPromptAttention([s], dtype="float32", beside=store).threads == 3
    assert torch.equal(attend(batch, "float32"), attend(batch, "float32", beside=store))


def test_bad_arguments_are_named():
    s = shape(1, 8, 2)
    prompts = CpuPromptAttention([s], dtype="float32")
    q, kv, packed = torch.zeros(3, 16), torch.zeros(3, 8), torch.zeros(prompts.packed_bytes(0, 3), dtype=torch.uint8)
    good = [0, [packed], [0], [3], q, kv, kv, torch.zeros(3, 16), None, [1]]
    prompts.attend(*good)
    for at, value, message in (
        (0, 1, "layer 1 is out of range: expected 0 to 0"),
        (1, [], "packed, starts and counts: expected the same length"),
        (1, [packed[:-1]], "packed: expected at least"),
        (2, [62], "packed: expected at least"),
        (2, [-1], "starts and counts: expected none below 0"),
        (3, [2], r"q: expected shape \[2, 16\], got \[3, 16\]"),
        (5, q, r"k: expected shape \[3, 8\], got \[3, 16\]"),
        (6, kv.bfloat16(), "v: expected the dtype"),
        (8, torch.zeros(2), "sinks: expected None for this layer, got 2 values"),
        (9, [4], "skipped_queries: expected 0 to the count of every chunk"),
        (9, [1, 1], "skipped_queries: expected 1, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            prompts.attend(*good[:at], value, *good[at + 1 :])
    with pytest.raises(TypeError, match="packed: expected uint8, got float32"):
        prompts.attend(0, [torch.zeros(5000)], *good[2:])
    with pytest.raises(ValueError, match="dtype: expected float32 or bfloat16, got 'float16'"):
        CpuPromptAttention([s], dtype="float16")
