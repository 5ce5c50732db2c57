"""Chosen tokens, pools, blocks, compressed entries and biases by torch's operations, as on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention import torch_cache, torch_choice, torch_reads
from hpcdecode.attention.base import KV_DTYPES, LATENT_KV_DTYPES
from hpcdecode.attention.open import block_bytes, open_kv_cache
from hpcdecode.attention.shapes import IndexerShape, LayerShape, PositionBias
from hpcdecode.attention.swapped_blocks import blocks_of
from hpcdecode.attention.torch_cache import TorchKvCache
from tests.support.attention_cases import expected, ints, layer_by_layer, make_batch, run_batch, shape
from tests.support.told import Told

LENGTHS = (1, 3, 63, 64, 65, 79, 80, 81, 96, 97, 129, 300, 1500)
COUNTS = (1, 3, 60, 1, 2, 30, 1, 80, 1, 2, 2, 5, 1)
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 4e-2, "int8": 6e-2, "k8v4": 0.1, "int4": 0.25}


def latent(topk=64, heads=5, dim=24, pool=1, **rest):
    return LayerShape(1, 80, 64, 6, 0.1, latent=True, indexer=IndexerShape(topk, heads, dim, pool), **rest)


def entries(rate=4, topk=None, heads=5, window=24, sinks=True):
    indexer = IndexerShape(topk, heads, 32) if topk else None
    return LayerShape(1, 80, 80, 6, 0.1, window, None, sinks, True, indexer, compress_rate=rate)


SHAPES = {
    "latent tokens": latent(sinks=True),
    "latent pools": latent(60, 32, 32, 4),
    "pools": LayerShape(2, 40, 24, 6, 0.1, indexer=IndexerShape(64, 5, 24, 16)),
    "tokens": LayerShape(2, 33, 17, 2, 0.2, indexer=IndexerShape(70, 4, 16), softcap=20.0),
    "blocks": LayerShape(4, 32, 32, 16, 0.1, indexer=IndexerShape(64, 4, 32, 16, 1), sinks=True),
    "blocks of one": LayerShape(2, 40, 24, 4, 0.1, indexer=IndexerShape(50, 2, 24, 1, 3)),
    "odd blocks": LayerShape(2, 40, 24, 4, 0.1, indexer=IndexerShape(40, 2, 24, 20, 2)),
    "entries": entries(),
    "chosen entries": entries(topk=10),
    "one entry": entries(4, 1, 32, 130),
    "rare entries": entries(128, sinks=False),
    "an entry a token": entries(1, topk=7, window=1),
}
BIASES = {
    "profiles": shape(2, 32, 4, bias=PositionBias(4, 100, np.linspace(-1, 1, 400, dtype=np.float32).tobytes())),
    "a window": shape(2, 16, 2, window=70, bias=PositionBias(2, 70, np.ones(140, np.float32).tobytes())),
    "linear": shape(3, 32, 1, bias=PositionBias(2, 0)),
    "sinks of tokens": shape(2, 16, 3, row_sinks=True),
    "both": shape(2, 24, 1, bias=PositionBias(1, 3000, np.arange(3000, dtype=np.float32).tobytes()), row_sinks=True),
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Let rows have many chunks, and groups few of them."""
    monkeypatch.setattr(torch_reads, "CHUNK", 32)
    monkeypatch.setattr(torch_cache, "CHUNK", 32)
    monkeypatch.setattr(torch_cache, "_CPU_GROUP_BYTES", 1 << 17)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request):
    return request.param


def run(batch, kv_dtype, **options):
    return run_batch(batch, kv_dtype, backend="torch", **options)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block_tokens", [64, 16, 20])
def test_attends_to_what_is_chosen(name, block_tokens, device):
    """Rows that see all that is chosen, one token more, and parts of pools. Products of bfloat16 are exact."""
    which = SHAPES[name]
    for kv_dtype in LATENT_KV_DTYPES if which.latent else KV_DTYPES:
        dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
        batch = make_batch(which, LENGTHS, COUNTS, dtype)
        got = run(batch, kv_dtype, block_tokens=block_tokens, device=device).double()
        torch.testing.assert_close(got, expected(batch, kv_dtype), rtol=0, atol=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("name", BIASES)
def test_adds_biases_and_sinks_of_tokens(name, device):
    which = BIASES[name]
    batch = make_batch(which, LENGTHS, COUNTS)
    for rows in batch.rows:  # slopes are positive, and profiles mixed in small parts
        rows[:, which.own_q_columns : which.own_q_columns + which.bias_columns].abs_().div_(100)
    for kv_dtype in ("float32", "int8"):
        got, want = run(batch, kv_dtype, device=device).double(), expected(batch, kv_dtype)
        torch.testing.assert_close(got, want, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [*SHAPES, *BIASES])
def test_a_row_alone_is_a_row_in_company(name, monkeypatch):
    batch = make_batch((SHAPES | BIASES)[name], LENGTHS, COUNTS, torch.bfloat16)
    together, starts = run(batch, "bfloat16"), np.cumsum([0, *COUNTS])
    for i in range(len(LENGTHS)):
        assert torch.equal(run(batch, "bfloat16", which=[i]), together[starts[i] : starts[i + 1]]), i
    monkeypatch.setattr(torch_cache, "_PARTIAL_BYTES", 1)  # a wave for every row
    monkeypatch.setattr(torch_choice, "_MOST_SCORES", 1)
    assert torch.equal(run(batch, "bfloat16", block_tokens=24), together)


@pytest.mark.parametrize("name", ["latent tokens", "latent pools", "pools", "blocks"])
def test_a_layer_without_an_indexer_attends_to_the_choice_before(name):
    own = replace(SHAPES[name], sinks=False)
    taking = replace(own, indexer=replace(own.indexer, heads=0, dim=0))
    batches = [make_batch(own, [200], [4]), make_batch(taking, [200], [4], seed=1)]
    for got, want in zip(layer_by_layer(batches, "torch"), layer_by_layer(batches, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_choice_that_was_not_made_is_refused():
    layers = [latent(topk=30), LayerShape(1, 40, 24, 4, 0.2, latent=True, indexer=IndexerShape(30))]
    store = open_kv_cache(layers, kv_dtype="float32", capacity_tokens=256, max_sequences=2, backend="torch")
    store.extend([0], [50])
    row, out = torch.zeros(1, layers[1].row_columns), torch.zeros(1, layers[1].out_columns)
    with pytest.raises(ValueError, match="expected the layers whose choice this one takes to attend before"):
        store.attend(1, [0], [1], row, out)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.0])
def test_of_equal_scores_the_first_are_chosen(weight):
    """Scores of 0 of all tokens, or of most; of these some are -0.0."""
    batch = make_batch(replace(SHAPES["latent tokens"], indexer=IndexerShape(20, 2, 16)), [150], [1])
    s, rows = batch.shape, batch.rows[0]
    rows[:, s.own_q_columns : s.q_columns - 2] = 1.0
    rows[:, s.q_columns - 2 : s.q_columns] = weight
    rows[:, -16:] = -1.0
    rows[[3, 70, 149], -16:] = 1.0
    torch.testing.assert_close(run(batch, "float32").double(), expected(batch, "float32"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["latent pools", "blocks", "chosen entries", "rare entries"])
def test_forks_and_blocks_that_move_keep_entries_and_index_keys(name):
    batch = make_batch(SHAPES[name], [151], [1])
    s, old = batch.shape, 150
    store = TorchKvCache([s], "bfloat16", 1024, 3, 64)
    store.extend([0], [old])
    store.append(0, [0], [old], batch.rows[0][:old, s.q_columns :])
    store.fork(0, 1)
    store.extend([2], [old])
    blocks = blocks_of(store)
    room = blocks.memory(blocks.held_blocks(0) * blocks.block_bytes)
    blocks.copy_out(0, 0, room)()
    blocks.copy_in(2, 0, room)
    store.extend([0, 1, 2], [1, 1, 1])
    out = torch.empty(3, s.out_columns)
    store.attend(0, [0, 1, 2], [1, 1, 1], batch.rows[0][old:].repeat(3, 1), out, batch.sinks)
    store.check()
    assert torch.equal(out, run(batch, "bfloat16").expand(3, -1))


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_take_the_bytes_that_are_counted(name):
    s = SHAPES[name]
    for kv_dtype in LATENT_KV_DTYPES if s.latent else KV_DTYPES:
        store = TorchKvCache([s, s], kv_dtype, 256, 1, 64)
        assert store.bytes == 4 * block_bytes([s, s], kv_dtype, 64, torch.device("cpu"))


@pytest.mark.parametrize("name", [*SHAPES, "both"])
def test_a_device_is_told_what_to_do_without_a_wait(name, monkeypatch):
    """Nothing is read back, and what goes to the device goes there at the first layer."""
    monkeypatch.setattr(torch_reads, "CHUNK", 512)
    monkeypatch.setattr(torch_cache, "CHUNK", 512)
    s = replace((SHAPES | BIASES)[name], sinks=False)
    n, layers, told = 40, 2, []
    store = TorchKvCache([s] * layers, "bfloat16", 1 << 16, n, None, "meta")
    slots, ones = ints(range(n)), ints([1] * n)
    store.extend(slots, ints(range(100, 100 + n)))
    rows = torch.zeros(n, s.row_columns, dtype=torch.bfloat16, device="meta")
    out = torch.zeros(n, s.out_columns, dtype=torch.bfloat16, device="meta")
    for _ in range(2):
        store.extend(slots, ones)
        for layer in range(layers):
            with Told() as own:
                store.attend(layer, slots, ones, rows, out)
            told.append((own.copies, own.operators))
    assert told[3][0] == 0 and told[3][1] <= 150, told
