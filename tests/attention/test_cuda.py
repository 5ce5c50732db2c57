"""The device's kernels against float64, on a GPU where there is one and as loops of this machine's compiler everywhere.

Emulated, every second block runs its threads in falling order, copies to shared memory happen when they are waited for,
and shared memory begins as NaN: a missing barrier or wait is a wrong result.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch

from hpcdecode.attention import cuda as attention_cuda
from hpcdecode.attention.base import native_shapes
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from tests.support.attention_cases import expected, ints, make_batch, run_batch, shape

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and attention_cuda.built() else [])]
LENGTHS = (1, 17, 64, 65, 130, 513, 1100)
COUNTS = (1, 2, 40, 1, 17, 1, 2)
SHAPES = {
    "mha64": shape(2, 64, 1),
    "gqa4_128": shape(2, 128, 4),
    "gqa2_96": shape(1, 96, 2),
    "gqa5_192_v128": shape(1, 192, 5, v_dim=128),
    "gqa7_256_softcap": shape(1, 256, 7, softcap=30.0),
    "gqa6_33_window": shape(1, 33, 6, window=50),
    "gqa4_40_chunks": shape(1, 40, 4, window=50, chunked=True),
    "gqa16_64_sinks_window": shape(1, 64, 16, window=128, sinks=True),
    "gqa24_48_sinks": shape(1, 48, 24, sinks=True),
    "tiny": shape(3, 1, 1),
    "k7_v130": shape(2, 7, 3, v_dim=130),
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def run(batch, kv_dtype, device, **options):
    return run_batch(batch, kv_dtype, backend="attn_cuda", device=device, **options)


@lru_cache(maxsize=1)
def case(name):
    batch = make_batch(SHAPES[name], LENGTHS, COUNTS)
    return batch, {dtype: expected(batch, dtype) for dtype in attention_cuda.KV_DTYPES}


@pytest.mark.parametrize("kv_dtype", attention_cuda.KV_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_matches_float64(name, kv_dtype, device):
    """Queries and weights keep 16 bits or more, as the sums of two numbers."""
    batch, answers = case(name)
    error = (run(batch, kv_dtype, device).double() - answers[kv_dtype]).abs().max().item()
    scale = max(r[:, batch.shape.q_columns :].abs().max().item() for r in batch.rows)
    assert error <= 1e-5 * scale


@pytest.mark.parametrize("kv_dtype", attention_cuda.KV_DTYPES)
@pytest.mark.parametrize("name", ["gqa4_128", "gqa7_256_softcap", "gqa16_64_sinks_window", "k7_v130"])
def test_bfloat16_activations(name, kv_dtype, device):
    """Queries and weights are single numbers of 16 bits, where K and V are not float32."""
    batch = make_batch(SHAPES[name], LENGTHS, COUNTS, torch.bfloat16)
    out, answer = run(batch, kv_dtype, device).double(), expected(batch, kv_dtype)
    assert (out - answer).abs().max() <= 1e-2 * answer.abs().max()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int4"])
def test_many_pieces(kv_dtype, device):
    """More pieces than a merge has warps; the rows of one sequence begin in different pieces."""
    batch = make_batch(shape(1, 32, 6, window=3000, sinks=True), (5200, 4700), (3, 1))
    error = (run(batch, kv_dtype, device).double() - expected(batch, kv_dtype)).abs().max().item()
    assert error <= 1e-5 * max(r.abs().max().item() for r in batch.rows)
    assert torch.equal(run(batch, kv_dtype, device)[3:], run(batch, kv_dtype, device, which=[1]))


@pytest.mark.parametrize("kv_dtype", attention_cuda.KV_DTYPES)
def test_large_scores_do_not_overflow(kv_dtype, device):
    s = LayerShape(1, 16, 16, 2, 1.0)
    batch = make_batch(s, [700, 130], [1, 3])
    for rows in batch.rows:
        rows[:, s.q_columns :][:, :16] *= torch.linspace(0.1, 40, len(rows))[:, None]
        rows[:, : s.q_columns] = rows[:, : s.q_columns].bfloat16().float()
    error = (run(batch, kv_dtype, device).double() - expected(batch, kv_dtype)).abs().max().item()
    assert error <= 4e-4


@pytest.mark.parametrize("kv_dtype", attention_cuda.KV_DTYPES)
@pytest.mark.parametrize("name", ["gqa4_128", "gqa16_64_sinks_window"])
def test_same_bits_however_batched_and_in_blocks_of_any_size(name, kv_dtype, device):
    batch, _ = case(name)
    whole = run(batch, kv_dtype, device)
    for block_tokens in (1, 24):
        assert torch.equal(whole, run(batch, kv_dtype, device, block_tokens=block_tokens)), block_tokens
    order, starts = [6, 3, 0, 5, 2, 4, 1], torch.tensor([0, *COUNTS]).cumsum(0).tolist()
    rows = torch.cat([whole[starts[i] : starts[i + 1]] for i in order])
    assert torch.equal(rows, run(batch, kv_dtype, device, which=order))
    assert torch.equal(whole[starts[6] : starts[7]], run(batch, kv_dtype, device, which=[6]))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int4"])
def test_many_queries_equal_one_at_a_time(kv_dtype, device):
    """A chunk of 70 queries x 12 heads of one KV head, many row blocks, gives what decoding gives."""
    s = LayerShape(1, 32, 48, 12, 0.2, window=300)
    chunk = run(make_batch(s, [600], [70]), kv_dtype, device)
    for j in (0, 1, 33, 69):
        length = 600 - 70 + j + 1
        batch = make_batch(s, [600], [70])
        batch.rows[0], batch.lengths[0], batch.counts[0] = batch.rows[0][:length], length, 1
        assert torch.equal(chunk[j : j + 1], run(batch, kv_dtype, device))


def test_layers_of_different_shapes(device):
    layers = [LayerShape(1, 8, 16, 2, 0.3), SHAPES["gqa4_128"], LayerShape(5, 3, 3, 5, 1.0)]
    batch, _ = case("gqa4_128")
    assert torch.equal(run(batch, "float16", device), run(batch, "float16", device, layers=layers, layer=1))


@pytest.mark.parametrize("kv_dtype", attention_cuda.KV_DTYPES)
def test_forks_take_their_own_ways(kv_dtype, device):
    """A fork in the middle of a block goes on apart from its origin, at every layer."""
    s, tokens = SHAPES["gqa4_128"], 100
    options = {"kv_dtype": kv_dtype, "capacity_tokens": 1024, "max_sequences": 3}
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(2, tokens + 2, s.row_columns, generator=g)
    rows[1, :tokens] = rows[0, :tokens]

    def decode(store, slots):
        out = torch.full((len(slots), s.out_columns), float("nan"), device=device)
        for i in (tokens, tokens + 1):
            store.extend(slots, [1] * len(slots))
            for layer in range(2):
                store.attend(layer, slots, [1] * len(slots), rows[: len(slots), i].to(device) * (1 + layer), out)
        return out.cpu()

    stores = [open_kv_cache([s, s], backend="attn_cuda", device=device, **options) for _ in range(2)]
    for store, slots in zip(stores, ([0], [0, 2]), strict=True):
        store.extend(slots[:1], [tokens])
        for layer in range(2):
            kv = rows[0, :tokens, s.q_columns :].to(device) * (1 + layer)
            store.append(layer, slots[:1], [tokens], kv)
    stores[1].fork(0, 2)
    alone, both = decode(stores[0], [0]), decode(stores[1], [0, 2])
    stores[1].check()
    assert torch.equal(alone[0], both[0]) and not torch.equal(both[0], both[1])


def test_memory_that_is_not_there_is_told_in_bytes():
    module = attention_cuda.native(torch.device("cpu"))
    layers = native_shapes([shape(1, 64, 1)], module.LayerShape)
    with pytest.raises(MemoryError, match=f"no room for {2**50 * 256} bytes of KV cache"):
        module.KvCache(layers, "bfloat16", 2**50, 1, 2**30, 0)


def test_few_batches_on_the_device_give_the_same():
    """A call whose sequences another call has displaced sends them again."""
    module, s = attention_cuda.native(torch.device("cpu")), shape(1, 32, 2)
    rows = torch.randn(6, s.row_columns, generator=torch.Generator().manual_seed(3))
    outs = []
    for batches in (1, 10):
        cache = module.KvCache(native_shapes([s], module.LayerShape), "bfloat16", 256, 6, 16, 0, batches)
        out = torch.full((6, s.out_columns), float("nan"))
        cache.extend(ints(range(6)), ints([1] * 6), 0)
        for _ in range(2):
            for slot in range(6):
                cache.attend(0, ints([slot]), ints([1]), rows[slot : slot + 1], out[slot : slot + 1], None, 0)
        outs.append(out)
    assert torch.equal(*outs) and not outs[0].isnan().any()


def test_what_the_kernels_do_not_take_is_refused():
    for s, kv_dtype, message in (
        (shape(1, 64, 1), "int2", "kv_dtype: expected float32, float16, bfloat16, int8, k8v4 or int4, got 'int2'"),
        (shape(1, 40, 4, v_dim=32, latent=True), "int4", "float16, bfloat16 or int8 for values in K, got int4"),
        (shape(1, 64, 1, v_dim=512), "k8v4", "expected V heads of at most 256 dims on a device, got 512"),
        (shape(1, 64, 1, v_dim=512), "bfloat16", "expected V heads of at most 256 dims on a device, got 512"),
        (shape(1, 1024, 1, v_dim=64), "float32", "bytes of shared memory"),
    ):
        with pytest.raises(ValueError, match=message):
            open_kv_cache([s], kv_dtype=kv_dtype, capacity_tokens=64, max_sequences=1, backend="attn_cuda")
    store = open_kv_cache(
        [shape(1, 8, 1)], kv_dtype="float32", capacity_tokens=64, max_sequences=1, backend="attn_cuda"
    )
    store.extend([0], [1])
    with pytest.raises(ValueError, match=r"qkv: expected shape \[1, 24\]"):
        store.attend(0, [0], [1], torch.zeros(1, 23), torch.zeros(1, 8))
    with pytest.raises(ValueError, match="count 2 does not fit its length 1"):
        store.append(0, [0], [2], np.zeros((2, 16), np.float32))
