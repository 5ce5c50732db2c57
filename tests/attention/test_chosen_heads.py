"""Attention to chosen tokens where there are several KV heads: one choice for all, or blocks for each."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention.base import KV_DTYPES
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import IndexerShape, LayerShape
from hpcdecode.attention.sizes import bytes_per_token
from tests.support.attention_cases import answered, expected, forked_and_moved, layer_by_layer, make_batch, run_batch

LENGTHS = (1, 63, 64, 65, 79, 80, 81, 95, 96, 97, 300, 1500, 1100)
COUNTS = (1, 3, 1, 2, 30, 1, 80, 1, 1, 2, 5, 1, 40)
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 4e-2, "int8": 6e-2, "k8v4": 0.1, "int4": 0.25}
SHAPES = {
    "pools": LayerShape(2, 40, 24, 6, 0.1, indexer=IndexerShape(64, 5, 24, 16)),
    "small_pools": LayerShape(3, 64, 64, 3, 0.1, indexer=IndexerShape(60, 32, 32, 4), sinks=True),
    "tokens": LayerShape(2, 33, 17, 2, 0.2, indexer=IndexerShape(70, 4, 16), softcap=20.0),
    "blocks": LayerShape(4, 32, 32, 16, 0.1, indexer=IndexerShape(64, 4, 32, 16, 1)),
    "large_blocks": LayerShape(2, 64, 64, 8, 0.1, indexer=IndexerShape(256, 2, 24, 128, 1)),
    "blocks_of_one": LayerShape(2, 40, 24, 4, 0.1, indexer=IndexerShape(50, 2, 24, 1, 3)),
    "odd_blocks": LayerShape(2, 40, 24, 4, 0.1, indexer=IndexerShape(40, 2, 24, 20, 2)),
}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block_tokens", [64, 16, 20])
def test_attends_to_what_is_chosen(name, kv_dtype, block_tokens, isa):
    """Queries that see all that is chosen, one token more, and parts of pools. Products of bfloat16 are exact."""
    which = SHAPES[name]
    if name == "pools" and block_tokens == 20:
        block_tokens = 32
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    batch, answer = answered(which, LENGTHS, COUNTS, dtype, kv_dtype)
    got = run_batch(batch, kv_dtype, block_tokens=block_tokens, threads=2).double()
    torch.testing.assert_close(got, answer, rtol=0, atol=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_attends_alike(name):
    batch = make_batch(SHAPES[name], LENGTHS, COUNTS)
    for kv_dtype in KV_DTYPES:
        got = run_batch(batch, kv_dtype, backend="reference").double()
        torch.testing.assert_close(got, expected(batch, kv_dtype), rtol=0, atol=1e-5)


def test_every_head_attends_to_its_own_blocks():
    """Values are all ones in one block for each head, which the index head of that number alone finds."""
    shape = LayerShape(2, 16, 16, 2, 1.0, indexer=IndexerShape(16, 2, 8, 16, 1))
    batch = make_batch(shape, [96], [1])
    rows = batch.rows[0]
    rows[:] = 0
    of_index, keys = (
        rows[:, shape.own_q_columns : shape.q_columns],
        rows[:, shape.q_columns + 32 : shape.q_columns + 40],
    )
    values = rows[:, shape.q_columns + 40 :]
    of_index[-1] = torch.eye(2, 8).flatten()
    keys[20, 0], keys[70, 1] = 1.0, 1.0
    values[16:32, :16], values[64:80, 16:] = 1.0, 1.0
    out = run_batch(batch, "float32").view(2, 16)
    torch.testing.assert_close(out, torch.full((2, 16), 0.5))  # of the chosen block, and of the last one


@pytest.mark.parametrize("backend", ["attn_cpu", "reference"])
@pytest.mark.parametrize("name", ["pools", "blocks"])
def test_a_layer_without_an_indexer_attends_to_the_choice_before(name, backend):
    own = SHAPES[name]
    taking = replace(own, indexer=replace(own.indexer, heads=0, dim=0))
    first, second = make_batch(own, [200], [4]), make_batch(taking, [200], [4], seed=1)
    got = layer_by_layer([first, second], backend)
    both = make_batch(own, [200], [4])
    q, k, v = second.rows[0].split([taking.q_columns, taking.k_columns, taking.v_columns], 1)
    index_q = first.rows[0][:, own.own_q_columns : own.q_columns]
    index_k = first.rows[0][:, own.q_columns + own.own_k_columns : own.q_columns + own.k_columns]
    both.rows[0] = torch.cat((q, index_q, k, index_k, v), 1)
    torch.testing.assert_close(got[1].double(), expected(both, "float32"), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (LayerShape(2, 8, 8, 2, 1.0, indexer=IndexerShape(32, 4, 8, 16, 1)), "an index head of its own"),
        (LayerShape(2, 8, 8, 2, 1.0, window=9, indexer=IndexerShape(32, 2, 8, 16)), "where there is no window"),
        (LayerShape(2, 8, 8, 2, 1.0, indexer=IndexerShape(40, 2, 8, 16, 1)), "must be whole pools"),
        (LayerShape(2, 8, 8, 2, 1.0, indexer=IndexerShape(9998, 2, 8, 4999)), "a block must be whole pools"),
        (LayerShape(2, 8, 8, 2, 1.0, indexer=IndexerShape(32, 0, 0, 16, 1)), "layer before it chose"),
    ],
)
def test_indexers_that_make_no_sense_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        open_kv_cache([wrong], kv_dtype="float32", capacity_tokens=64, max_sequences=1)


@pytest.mark.parametrize(("pool", "tokens"), [(1, 64), (16, 64), (48, 192), (128, 128)])
def test_blocks_are_whole_pools(pool, tokens):
    shape = LayerShape(2, 16, 16, 2, 0.3, indexer=IndexerShape(2 * pool, 16, 16, pool))
    store = open_kv_cache([shape], kv_dtype="float32", capacity_tokens=64, max_sequences=1)
    assert store.block_tokens == tokens
    batch = make_batch(shape, [5 * pool + 3], [1])
    torch.testing.assert_close(run_batch(batch, "float32").double(), expected(batch, "float32"), rtol=0, atol=1e-5)


def test_index_keys_count_as_stored_bytes():
    plain = LayerShape(4, 128, 128, 64, 0.1)
    blocks, pools = IndexerShape(1920, 4, 128, 128, 1), IndexerShape(2048, 4, 128, 16)
    for kv_dtype, more in (("float32", 512), ("bfloat16", 256), ("int4", 256)):
        without = bytes_per_token([plain], kv_dtype)
        assert bytes_per_token([replace(plain, indexer=blocks)], kv_dtype) - without == more
        assert bytes_per_token([replace(plain, indexer=pools)], kv_dtype) - without == more / 16


@pytest.mark.parametrize("name", ["pools", "small_pools", "blocks"])
def test_forks_and_blocks_that_move_keep_index_keys(name):
    batch = make_batch(replace(SHAPES[name], sinks=False), [150], [1])
    out = forked_and_moved(batch)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
    assert torch.equal(out[:1], run_batch(batch, "float32", which=[0]))
