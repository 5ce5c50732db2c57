"""The device's kernels over latents, emulated or on a GPU: against float64, the KV caches of CPUs, and each other."""

from functools import lru_cache

import pytest
import torch

from hpcdecode.attention import cuda as attention_cuda
from hpcdecode.attention.cuda import CudaKvCache, serves
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import IndexerShape, LayerShape
from tests.support.attention_cases import expected, ints, make_batch, run_batch, shape

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and attention_cuda.built() else [])]
KV_DTYPES = ("float32", "float16", "bfloat16")
LENGTHS, COUNTS = (1, 17, 64, 130, 1100), (1, 2, 20, 1, 2)  # the last one in two pieces
DEEPSEEK = LayerShape(1, 576, 512, 128, 0.07, latent=True)
SHAPES = {
    "mla6_48": shape(1, 48, 6, v_dim=32, latent=True),
    "mla5_40_window_sinks": shape(1, 40, 5, v_dim=40, latent=True, window=700, sinks=True),
    "mla20_30_softcap": shape(1, 30, 20, v_dim=20, latent=True, softcap=20.0),
    "mla40_33_sinks": shape(1, 33, 40, v_dim=7, latent=True, sinks=True),
    "mla3_24_chunks": shape(1, 24, 3, v_dim=16, latent=True, window=50, chunked=True),
}
MODELS = {
    "deepseek-v3": DEEPSEEK,
    "glm-4.7-flash": LayerShape(1, 576, 512, 20, 0.06, latent=True),
    "minicpm3": LayerShape(1, 288, 256, 40, 0.1, latent=True),
    "one tile at a time": LayerShape(1, 832, 512, 40, 0.05, latent=True),  # there is no room for two
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def run(batch, kv_dtype, device="cpu", **options):
    return run_batch(batch, kv_dtype, backend="attn_cuda", device=device, **options)


@lru_cache(maxsize=1)
def case(name):
    batch = make_batch(SHAPES[name], LENGTHS, COUNTS)
    return batch, {dtype: expected(batch, dtype) for dtype in KV_DTYPES}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_matches_float64(name, kv_dtype, device):
    """With float32 activations queries and weights keep 16 bits or more, as the sums of two numbers."""
    batch, answers = case(name)
    error = (run(batch, kv_dtype, device).double() - answers[kv_dtype]).abs().max().item()
    scale = max(r[:, batch.shape.q_columns :].abs().max().item() for r in batch.rows)
    assert error <= 1e-5 * scale


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_known_models_with_bfloat16_activations(name, kv_dtype, device):
    """Products are of single numbers of 16 bits, weights too, but sums of float32: 1 % of the largest value at most."""
    batch = make_batch(MODELS[name], (70, 1, 200), (1, 1, 1), torch.bfloat16)
    out, answer = run(batch, kv_dtype, device).double(), expected(batch, kv_dtype)
    assert (out - answer).abs().max() <= 0.01 * answer.abs().max()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["glm-4.7-flash", "one tile at a time"])
def test_known_models_with_float32_activations(name, kv_dtype, device):
    batch = make_batch(MODELS[name], (130, 65), (1, 1))
    error = (run(batch, kv_dtype, device).double() - expected(batch, kv_dtype)).abs().max().item()
    assert error <= 2e-5


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_equals_the_kv_caches_of_cpus(kv_dtype, act):
    batch = make_batch(MODELS["minicpm3"], (90, 33), (2, 1), act)
    out = run(batch, kv_dtype).float()
    for backend in ("reference", "attn_cpu", "torch"):
        other = run_batch(batch, kv_dtype, backend=backend).float()
        exact = act == torch.float32 and (kv_dtype, backend) != ("bfloat16", "attn_cpu")  # AMX has products of 16 bits
        assert (out - other).abs().max() <= (2e-5 if exact else 0.02) * other.abs().max(), backend


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_large_scores_do_not_overflow(kv_dtype, device):
    s = LayerShape(1, 16, 16, 2, 1.0, latent=True)
    batch = make_batch(s, [700, 130], [1, 3])
    for rows in batch.rows:
        rows[:, s.q_columns :] *= torch.linspace(0.1, 40, len(rows))[:, None]
        rows[:, : s.q_columns] = rows[:, : s.q_columns].bfloat16().float()
    answer = expected(batch, kv_dtype)
    assert (run(batch, kv_dtype, device).double() - answer).abs().max() <= 1e-5 * answer.abs().max()


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mla5_40_window_sinks", "mla40_33_sinks"])
def test_same_bits_however_batched_and_in_blocks_of_any_size(name, kv_dtype, act, device):
    batch = make_batch(SHAPES[name], LENGTHS, COUNTS, act)
    whole = run(batch, kv_dtype, device)
    for block_tokens in (1, 24):
        assert torch.equal(whole, run(batch, kv_dtype, device, block_tokens=block_tokens)), block_tokens
    order, starts = [4, 3, 0, 2, 1], torch.tensor([0, *COUNTS]).cumsum(0).tolist()
    rows = torch.cat([whole[starts[i] : starts[i + 1]] for i in order])
    assert torch.equal(rows, run(batch, kv_dtype, device, which=order))
    assert torch.equal(whole[starts[4] : starts[5]], run(batch, kv_dtype, device, which=[4]))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16])
def test_many_queries_equal_one_at_a_time(act, window, device):
    """A chunk of 30 queries x 40 heads, many row blocks, rows in the first piece, in both, or in the second alone."""
    s = LayerShape(1, 48, 32, 40, 0.2, latent=True, window=window)
    chunk = run(make_batch(s, [1040], [30], act), "bfloat16", device)
    for j in (0, 13, 14, 29):
        length = 1040 - 30 + j + 1
        batch = make_batch(s, [1040], [30], act)
        batch.rows[0], batch.lengths[0], batch.counts[0] = batch.rows[0][:length], length, 1
        assert torch.equal(chunk[j : j + 1], run(batch, "bfloat16", device)), length


def test_latents_beside_heads(device):
    """Layers of one model have their own forms; a step's batches do not mix them up."""
    layers = [shape(2, 32, 2), SHAPES["mla6_48"], SHAPES["mla40_33_sinks"]]
    batch, _ = case("mla6_48")
    assert torch.equal(run(batch, "float16", device), run(batch, "float16", device, layers=layers, layer=1))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_forks_take_their_own_ways(kv_dtype, device):
    """A fork in the middle of a block goes on apart from its origin at every layer; a truncated slot writes anew."""
    s, tokens = SHAPES["mla6_48"], 100
    rows = torch.randn(2, tokens + 2, s.row_columns, generator=torch.Generator().manual_seed(2)).to(device)
    rows[1, :tokens] = rows[0, :tokens]

    def decode(store, slots):
        out = torch.full((len(slots), s.out_columns), float("nan"), device=device)
        for i in (tokens, tokens + 1):
            store.extend(slots, [1] * len(slots))
            for layer in range(2):
                store.attend(layer, slots, [1] * len(slots), rows[: len(slots), i] * (1 + layer), out)
        return out.cpu()

    stores = [CudaKvCache([s, s], kv_dtype, 1024, 3, 48, device) for _ in range(2)]
    for store in stores:
        store.extend([0], [tokens])
        for layer in range(2):
            store.append(layer, [0], [tokens], rows[0, :tokens, s.q_columns :] * (1 + layer))
    stores[1].fork(0, 2)
    alone, both = decode(stores[0], [0]), decode(stores[1], [0, 2])
    stores[1].truncate(0, tokens)
    stores[1].check()
    assert torch.equal(alone[0], both[0]) and not torch.equal(both[0], both[1])
    assert torch.equal(alone, decode(stores[1], [0]))


def test_latents_lie_once():
    store = CudaKvCache([DEEPSEEK, DEEPSEEK], "bfloat16", 128, 1, 64, "cpu")
    assert store.bytes == 2 * 128 * 1152
    store.extend([0], [100])
    store.append(0, [0], [100], torch.zeros(100, 576, dtype=torch.bfloat16))
    out = torch.zeros(1, DEEPSEEK.out_columns, dtype=torch.bfloat16)
    store.attend(0, [0], [1], torch.zeros(1, DEEPSEEK.row_columns, dtype=torch.bfloat16), out)
    assert store.bytes_read == 100 * 1152
    small = CudaKvCache([SHAPES["mla40_33_sinks"]], "float32", 64, 1, 64, "cpu")
    assert small.bytes == 64 * 48 * 4  # rows are padded to 16 elements


@pytest.mark.parametrize(
    ("s", "kv_dtype", "message"),
    [
        (DEEPSEEK, "int8", "kv_dtype: expected float32, float16 or bfloat16 for values in K on a device, got 'int8'"),
        (shape(1, 576, 1, v_dim=528, latent=True), "bfloat16", "V heads of at most 512 dims on a device, got 528"),
        (shape(1, 1600, 1, v_dim=512, latent=True), "bfloat16", "dims need .* bytes of shared memory"),
        (LayerShape(1, 8, 4, 2, 0.5, latent=True, indexer=IndexerShape(4, 2, 4)), "float32", "one with an indexer"),
        (LayerShape(1, 8, 9, 2, 0.5, latent=True), "float32", "v_dim <= k_dim"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(s, kv_dtype, message):
    with pytest.raises(ValueError, match=message):
        open_kv_cache([s], kv_dtype=kv_dtype, capacity_tokens=64, max_sequences=1, backend="attn_cuda", device="cpu")
    assert not serves([s], kv_dtype, torch.device("cpu"))


def test_bad_calls():
    store = CudaKvCache([SHAPES["mla6_48"]], "float32", 64, 1, None, "cpu")
    store.extend(ints([0]), ints([3]))
    with pytest.raises(ValueError, match=r"qkv: expected shape \[3, 336\]"):
        store.attend(0, [0], [3], torch.zeros(3, 368), torch.zeros(3, 192))
    with pytest.raises(ValueError, match=r"kv: expected shape \[3, 48\]"):
        store.append(0, [0], [3], torch.zeros(3, 80))
    with pytest.raises(ValueError, match="this layer was opened without attention sinks"):
        store.attend(0, [0], [3], torch.zeros(3, 336), torch.zeros(3, 192), torch.zeros(6))


def test_without_cuda_latents_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(attention_cuda, "built", lambda: False)
    assert not serves([DEEPSEEK], "bfloat16", torch.device("cuda", 0))
    assert serves([DEEPSEEK], "bfloat16", torch.device("cpu"))
