"""A sequence's output has the same bits whatever runs beside it, on however many threads, in blocks of any size."""

import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention.base import KV_DTYPES, LATENT_KV_DTYPES
from hpcdecode.attention.shapes import IndexerShape, LayerShape
from tests.support.attention_cases import make_batch, run_batch

LENGTHS = (1, 30, 64, 200, 513, 1400, 2600, 77)
COUNTS = (1, 2, 1, 40, 1, 3, 1, 1)
SHAPES = {
    "gqa3_64": LayerShape(4, 64, 64, 12, 0.125),
    "gqa4_64_chunks": LayerShape(1, 64, 64, 4, 0.1, window=200, chunked=True),
    "gqa8_96": LayerShape(1, 96, 80, 8, 0.1, window=900),
    "mha_window_sinks": LayerShape(2, 40, 24, 2, 0.2, window=700, sinks=True),
    "latent": LayerShape(1, 72, 64, 20, 0.1, latent=True),
    "chosen": LayerShape(1, 72, 64, 20, 0.1, latent=True, indexer=IndexerShape(1100, 5, 24)),
    "pools": LayerShape(1, 72, 64, 20, 0.1, latent=True, indexer=IndexerShape(640, 5, 24, 4)),
    "few_chosen": LayerShape(1, 80, 32, 32, 0.1, latent=True, indexer=IndexerShape(48, 32, 32)),
    "pools_16": LayerShape(1, 72, 64, 20, 0.1, latent=True, indexer=IndexerShape(640, 5, 24, 16)),
    "gqa2_64_pools": LayerShape(2, 64, 64, 4, 0.1, indexer=IndexerShape(640, 5, 24, 4)),
    "gqa4_64_blocks": LayerShape(2, 64, 40, 8, 0.1, indexer=IndexerShape(512, 2, 24, 64, 1)),
}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_threads_blocks_and_batch(name, kv_dtype, isa):
    if SHAPES[name].latent and kv_dtype not in LATENT_KV_DTYPES:
        pytest.skip("refused")
    batch = make_batch(SHAPES[name], LENGTHS, COUNTS)
    one = run_batch(batch, kv_dtype, threads=1, block_tokens=64)
    indexer = SHAPES[name].indexer
    pool = indexer.key_tokens if indexer else 1  # which the tokens of blocks are multiples of
    for threads, block_tokens in ((2, 64), (3, 16), (1, pool), (2, -(-24 // pool) * pool), (4, 512)):
        again = run_batch(batch, kv_dtype, threads=threads, block_tokens=block_tokens)
        assert torch.equal(one, again), f"{threads} threads, blocks of {block_tokens}"
    order = [6, 3, 0, 7, 5, 2, 4, 1]
    starts = torch.tensor([0, *COUNTS]).cumsum(0).tolist()
    expected = torch.cat([one[starts[i] : starts[i + 1]] for i in order])
    assert torch.equal(expected, run_batch(batch, kv_dtype, which=order, threads=2))
    for i in (3, 6):
        alone = run_batch(batch, kv_dtype, which=[i], threads=2)
        assert torch.equal(one[starts[i] : starts[i + 1]], alone), f"sequence {i} alone"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("latent", [False, True, "chosen"])
def test_many_queries_equal_one_at_a_time(kv_dtype, latent, isa):
    """A chunk of 70 queries x 12 heads of one KV head (several row blocks) gives what decoding gives."""
    if latent and kv_dtype not in LATENT_KV_DTYPES:
        pytest.skip("refused")
    shape = LayerShape(1, 48 if latent else 32, 48, 12, 0.2, window=300, latent=bool(latent))
    if latent == "chosen":
        shape = replace(shape, window=None, indexer=IndexerShape(560, 6, 16))
    chunk = run_batch(make_batch(shape, [600], [70]), kv_dtype, threads=2)
    for j in (0, 1, 33, 69):
        length = 600 - 70 + j + 1
        batch = make_batch(shape, [600], [70])
        batch.rows[0], batch.lengths[0], batch.counts[0] = batch.rows[0][:length], length, 1
        assert torch.equal(chunk[j : j + 1], run_batch(batch, kv_dtype))


def test_layers_of_different_shapes(isa):
    layers = [LayerShape(1, 8, 16, 2, 0.3), SHAPES["gqa3_64"], LayerShape(5, 3, 3, 5, 1.0)]
    batch = make_batch(SHAPES["gqa3_64"], LENGTHS, COUNTS)
    alone = run_batch(batch, "float32")
    assert torch.equal(alone, run_batch(batch, "float32", layers=layers, layer=1))
