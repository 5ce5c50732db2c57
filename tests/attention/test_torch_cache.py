"""The KV cache in torch, as on a GPU: against float64, in any company, and without waiting for the device."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch

from hpcdecode.attention import torch_cache, torch_reads
from hpcdecode.attention.base import KV_DTYPES, LATENT_KV_DTYPES, KvCapacityError
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import IndexerShape, LayerShape, PositionBias
from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.attention.torch_cache import TorchKvCache
from hpcdecode.attention.torch_rows import layer_bytes
from tests.support.attention_cases import expected, ints, make_batch, run_batch, shape
from tests.support.told import Told

LENGTHS, COUNTS = (1, 17, 130, 513, 1100), (1, 2, 20, 1, 2)
DEEPSEEK = LayerShape(1, 576, 512, 8, 0.07, latent=True)
SHAPES = {
    "mla6_48": shape(1, 48, 6, v_dim=32, latent=True),
    "mla5_40_window_sinks": shape(1, 40, 5, v_dim=40, latent=True, window=700, sinks=True),
    "mla2_30_softcap": shape(1, 30, 2, v_dim=20, latent=True, softcap=20.0),
    "gqa3_48_v32": shape(2, 48, 3, v_dim=32),
    "mha33_window": shape(2, 33, 1, window=50),
    "gqa2_24_chunks": shape(2, 24, 2, window=50, chunked=True),
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Let rows have many chunks, in trees of several levels."""
    monkeypatch.setattr(torch_reads, "CHUNK", 32)
    monkeypatch.setattr(torch_cache, "CHUNK", 32)


def kv_dtypes(s: LayerShape) -> tuple[str, ...]:
    return LATENT_KV_DTYPES if s.latent else KV_DTYPES


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request):
    return request.param


def run(batch, kv_dtype, device="cpu", **options):
    return run_batch(batch, kv_dtype, backend="torch", device=device, **options)


@lru_cache(maxsize=1)
def case(name):
    batch = make_batch(SHAPES[name], LENGTHS, COUNTS)
    return batch, {dtype: expected(batch, dtype) for dtype in kv_dtypes(SHAPES[name])}


CASES = [(name, dtype) for name, s in SHAPES.items() for dtype in kv_dtypes(s)]


@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_matches_float64(name, kv_dtype, device):
    batch, answers = case(name)
    error = (run(batch, kv_dtype, device).double() - answers[kv_dtype]).abs().max().item()
    scale = max(r[:, batch.shape.q_columns :].abs().max().item() for r in batch.rows)
    assert error <= 1e-5 * scale


def test_the_shape_of_deepseek(device):
    batch = make_batch(DEEPSEEK, (300, 65), (1, 1))
    error = (run(batch, "float32", device).double() - expected(batch, "float32")).abs().max().item()
    assert error <= 1e-5


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float16"])
def test_bfloat16_activations(kv_dtype, device):
    """Products are of bfloat16 numbers, weights too, but sums of float32: 1 % of the largest value at most."""
    batch = make_batch(DEEPSEEK, (300, 65, 1), (1, 2, 1), torch.bfloat16)
    out, answer = run(batch, kv_dtype, device).double(), expected(batch, kv_dtype)
    assert (out - answer).abs().max() <= 0.01 * answer.abs().max()


def test_large_scores_do_not_overflow():
    s = LayerShape(1, 16, 16, 2, 1.0, latent=True)
    batch = make_batch(s, [700, 130], [1, 3])
    for rows in batch.rows:
        rows[:, s.q_columns :] *= torch.linspace(0.1, 40, len(rows))[:, None]
    error = (run(batch, "float32").double() - expected(batch, "float32")).abs().max().item()
    assert error <= 4e-4


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["mla6_48", "mla5_40_window_sinks", "gqa3_48_v32"])
def test_same_bits_however_batched_and_in_blocks_of_any_size(name, kv_dtype, monkeypatch):
    monkeypatch.setattr(torch_cache, "_CPU_GROUP_BYTES", 32 * 48 * 4 * 7)  # groups of a few items
    batch, _ = case(name)
    whole = run(batch, kv_dtype)
    for block_tokens in (1, 24):
        assert torch.equal(whole, run(batch, kv_dtype, block_tokens=block_tokens)), block_tokens
    order, starts = [4, 3, 0, 2, 1], torch.tensor([0, *COUNTS]).cumsum(0).tolist()
    rows = torch.cat([whole[starts[i] : starts[i + 1]] for i in order])
    assert torch.equal(rows, run(batch, kv_dtype, which=order))
    assert torch.equal(whole[starts[4] : starts[5]], run(batch, kv_dtype, which=[4]))
    monkeypatch.setattr(torch_cache, "_PARTIAL_BYTES", 1)  # a wave for every row
    assert torch.equal(whole, run(batch, kv_dtype))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4"])
def test_forks_take_their_own_ways(kv_dtype):
    """A fork in the middle of a block goes on apart from its origin, at every layer."""
    s, tokens = SHAPES["gqa3_48_v32" if kv_dtype == "int4" else "mla6_48"], 100
    rows = torch.randn(2, tokens + 2, s.row_columns, generator=torch.Generator().manual_seed(2))
    rows[1, :tokens] = rows[0, :tokens]

    def decode(store, slots):
        out = torch.full((len(slots), s.out_columns), float("nan"))
        for i in (tokens, tokens + 1):
            store.extend(slots, [1] * len(slots))
            for layer in range(2):
                store.attend(layer, slots, [1] * len(slots), rows[: len(slots), i] * (1 + layer), out)
        return out

    stores = [TorchKvCache([s, s], kv_dtype, 1024, 3) for _ in range(2)]
    for store in stores:
        store.extend([0], [tokens])
        for layer in range(2):
            store.append(layer, [0], [tokens], rows[0, :tokens, s.q_columns :] * (1 + layer))
    stores[1].fork(0, 2)
    alone, both = decode(stores[0], [0]), decode(stores[1], [0, 2])
    stores[1].check()
    assert torch.equal(alone[0], both[0]) and not torch.equal(both[0], both[1])


@pytest.mark.parametrize(
    ("s", "kv_dtype", "most"),
    [
        (LayerShape(1, 576, 512, 128, 0.07, latent=True), "bfloat16", 32),
        (LayerShape(1, 576, 512, 128, 0.07, latent=True), "int8", 200),
        (shape(2, 64, 4, window=100, sinks=True, softcap=30.0), "int4", 200),
    ],
)
def test_a_device_is_told_what_to_do_without_a_wait(s, kv_dtype, most, monkeypatch):
    """Nothing is read back, and two small copies a step go there, at the first layer."""
    monkeypatch.setattr(torch_reads, "CHUNK", 512)
    monkeypatch.setattr(torch_cache, "CHUNK", 512)
    n, layers = 40, 3
    store = TorchKvCache([s] * layers, kv_dtype, 1 << 18, n, None, "meta")
    sinks = torch.zeros(s.q_heads) if s.sinks else None
    slots, ones = ints(range(n)), ints([1] * n)
    store.extend(slots, ints(range(100, 100 + n)))
    qkv = torch.zeros(n, s.row_columns, dtype=torch.bfloat16, device="meta")
    out = torch.zeros(n, s.out_columns, dtype=torch.bfloat16, device="meta")
    told = []
    for _ in range(2):
        store.extend(slots, ones)
        for layer in range(layers):
            with Told() as own:
                store.attend(layer, slots, ones, qkv, out, sinks)
            told.append((own.copies, own.operators))
    copies = [each for each, _ in told]
    assert copies == [2 + s.sinks, s.sinks, s.sinks, 2, 0, 0]
    assert max(operators for _, operators in told[1:layers]) <= most, told


def test_the_bytes_of_tokens():
    assert layer_bytes(DEEPSEEK, "bfloat16") == 1152
    assert layer_bytes(DEEPSEEK, "int8") == 576 + 2 * 2
    heads = LayerShape(8, 128, 128, 32, 0.1)
    assert layer_bytes(heads, "int8") == bytes_per_token([heads], "int8") == 8 * 260
    assert layer_bytes(heads, "k8v4") == 8 * (128 + 64 + 2 * 2 + 2)
    for s, kv_dtype in ((DEEPSEEK, "int8"), (heads, "int4"), (heads, "float16")):
        assert TorchKvCache([s, s], kv_dtype, 128, 1).bytes == 2 * 128 * layer_bytes(s, kv_dtype)


def test_bytes_read():
    store = TorchKvCache([SHAPES["mha33_window"]], "float32", 512, 2)
    store.extend([0, 1], [100, 20])
    s = store.layers[0]
    store.attend(0, [0, 1], [1, 0], torch.zeros(1, s.row_columns), torch.zeros(1, s.out_columns))
    assert store.bytes_read == 50 * layer_bytes(s, "float32") and store.attend_seconds > 0


SMALL = LayerShape(1, 8, 4, 4, 0.5, latent=True)


@pytest.fixture
def one():
    store = TorchKvCache([SMALL], "float32", 64, 4, 16)
    store.extend([1], [3])
    return store


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"layer": 1}, ValueError, "layer 1 is out of range"),
        ({"slots": [2]}, ValueError, "slot 2 is not open"),
        ({"slots": [4]}, ValueError, "slot 4 is out of range"),
        ({"slots": [1, 1], "counts": [1, 2]}, ValueError, "given twice"),
        ({"counts": [4]}, ValueError, "count 4 does not fit its length 3"),
        ({"counts": [-1]}, ValueError, "count -1 does not fit"),
        ({"counts": [1, 2]}, ValueError, "same length"),
        ({"qkv": torch.zeros(3, 41)}, ValueError, r"qkv: expected shape \[3, 40\]"),
        ({"qkv": torch.zeros(3, 40).double()}, TypeError, "expected float32 or bfloat16, got float64"),
        ({"out": torch.zeros(2, 16)}, ValueError, r"out: expected shape \[3, 16\]"),
        ({"out": torch.zeros(3, 16).bfloat16()}, ValueError, "same dtype"),
        ({"qkv": torch.zeros(3, 40, device="meta")}, ValueError, "qkv: expected a tensor on cpu, got one on meta"),
        ({"sinks": torch.zeros(4)}, ValueError, "sinks: expected None for layer 0"),
        ({"slots": np.array([1])}, TypeError, "slots: expected int32, got int64"),
    ],
)
def test_bad_calls(one, change, error, message):
    given = {"layer": 0, "slots": [1], "counts": [3], "qkv": torch.zeros(3, 40), "out": torch.zeros(3, 16)}
    with pytest.raises(error, match=message):
        one.attend(**(given | change))
    one.check()


def test_what_is_full_or_shared_is_told_and_nothing_changes(one):
    with pytest.raises(KvCapacityError, match="64 tokens needed, 48 free of 64"):
        one.extend([0, 1], [50, 10])
    one.fork(1, 2)
    with pytest.raises(ValueError, match="shared with a fork"):
        one.append(0, [2], [1], torch.zeros(1, 8))
    with pytest.raises(ValueError, match="slot 2 is open"):
        one.fork(1, 2)
    with pytest.raises(ValueError, match="slot 3 is not open"):
        one.release([1, 3])
    assert (one.length(1), one.free_blocks) == (3, 3)
    one.check()


def test_what_torch_does_not_take_is_refused():
    both = LayerShape(1, 8, 4, 2, 0.5, latent=True, indexer=IndexerShape(4, 2, 4), bias=PositionBias(1, 0))
    for s, kv_dtype, message in (
        (SMALL, "int4", "kv_dtype: expected one of float32, float16, bfloat16, int8 for latents, got 'int4'"),
        (shape(1, 8, 1), "int2", "kv_dtype: expected one of float32, float16, bfloat16, int8, k8v4, int4, got"),
        (both, "float32", "layer 0: expected biases where all tokens are attended to, got an indexer"),
    ):
        with pytest.raises(ValueError, match=message):
            open_kv_cache([s], kv_dtype=kv_dtype, capacity_tokens=64, max_sequences=1, backend="torch")
    with pytest.raises(ValueError, match="capacity_tokens: expected at least 1, got 0"):
        TorchKvCache([SMALL], "float32", 0, 1)
