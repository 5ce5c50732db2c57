"""Attention to the tokens that an indexer chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention.base import LATENT_KV_DTYPES
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import IndexerShape, LayerShape
from hpcdecode.attention.sizes import bytes_per_token
from tests.support.attention_cases import (
    answered,
    expected,
    forked_and_moved,
    ints,
    layer_by_layer,
    make_batch,
    run_batch,
)

LENGTHS, COUNTS = (1, 63, 64, 65, 300, 1500), (1, 3, 1, 2, 5, 1)
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 4e-2, "int8": 6e-2}


def shape(topk=64, heads=5, dim=24, q_heads=6, pool=1, **rest):
    return LayerShape(1, 80, 64, q_heads, 0.1, latent=True, indexer=IndexerShape(topk, heads, dim, pool), **rest)


@pytest.mark.parametrize("kv_dtype", LATENT_KV_DTYPES)
@pytest.mark.parametrize("which", [shape(), shape(heads=32, dim=32, q_heads=32), shape(heads=1, dim=3, sinks=True)])
@pytest.mark.parametrize("block_tokens", [64, 16, 5])
def test_attends_to_the_highest_scores(kv_dtype, which, block_tokens, isa):
    """Products of bfloat16 are exact, so that all choose alike."""
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    batch, answer = answered(which, LENGTHS, COUNTS, dtype, kv_dtype)
    got = run_batch(batch, kv_dtype, block_tokens=block_tokens, threads=2).double()
    torch.testing.assert_close(got, answer, rtol=0, atol=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("kv_dtype", LATENT_KV_DTYPES)
@pytest.mark.parametrize("which", [shape(pool=16), shape(topk=60, pool=4, heads=32, dim=32)])
@pytest.mark.parametrize("block_tokens", [64, 16])
def test_attends_to_pools_and_the_tokens_behind_them(kv_dtype, which, block_tokens, isa):
    """Queries that see whole pools, parts of one, all that are chosen, and one token more."""
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    batch, answer = answered(
        which, (1, 63, 64, 65, 79, 80, 81, 300, 1500), (1, 3, 1, 2, 30, 1, 80, 5, 1), dtype, kv_dtype
    )
    got = run_batch(batch, kv_dtype, block_tokens=block_tokens, threads=2).double()
    torch.testing.assert_close(got, answer, rtol=0, atol=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("pool", [1, 4])
def test_the_reference_attends_alike(pool):
    batch = make_batch(shape(pool=pool), LENGTHS, COUNTS)
    for kv_dtype in LATENT_KV_DTYPES:
        got = run_batch(batch, kv_dtype, backend="reference").double()
        torch.testing.assert_close(got, expected(batch, kv_dtype), rtol=0, atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.0])
def test_of_equal_scores_the_first_are_chosen(weight, isa):
    """Scores of 0 of all tokens, and of most: index keys are opposite to the query but for three tokens."""
    s = shape(topk=20, heads=2, dim=16)
    batch = make_batch(s, [150], [1])
    rows = batch.rows[0]
    rows[:, s.own_q_columns : s.q_columns - 2] = 1.0
    rows[:, s.q_columns - 2 : s.q_columns] = weight
    rows[:, -16:] = -1.0
    rows[[3, 70, 149], -16:] = 1.0
    kept = {0.0: [*range(20)], -1.0: [i for i in range(21) if i != 3], 1.0: [*range(18), 70, 149]}[weight]
    plain = LayerShape(1, 80, 64, 6, 0.1, latent=True)
    only = make_batch(plain, [20], [1])
    only.rows[0] = torch.cat((rows[:, : s.own_q_columns], rows[:, s.q_columns : -16]), 1)[kept]
    only.rows[0][-1, : s.own_q_columns] = rows[-1, : s.own_q_columns]
    torch.testing.assert_close(run_batch(batch, "float32"), run_batch(only, "float32"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pool", [1, 8])
@pytest.mark.parametrize("backend", ["attn_cpu", "reference"])
def test_a_layer_without_an_indexer_attends_to_the_choice_before(backend, pool):
    taking = IndexerShape(32, pool=pool)
    layers = [shape(topk=32, pool=pool), LayerShape(1, 40, 24, 4, 0.2, latent=True, indexer=taking)]
    first, second = make_batch(layers[0], [200], [4]), make_batch(layers[1], [200], [4], seed=1)
    got = layer_by_layer([first, second], backend)
    joined = LayerShape(1, 40, 24, 4, 0.2, latent=True, indexer=layers[0].indexer)
    both = make_batch(joined, [200], [4])
    q, k = second.rows[0].split([layers[1].q_columns, layers[1].kv_columns], 1)
    index_q = first.rows[0][:, layers[0].own_q_columns : layers[0].q_columns]
    both.rows[0] = torch.cat((q, index_q, k, first.rows[0][:, -24:]), 1)
    torch.testing.assert_close(got[1].double(), expected(both, "float32"), rtol=0, atol=1e-5)


def test_a_choice_that_was_not_made_is_refused():
    layers = [shape(topk=30), LayerShape(1, 40, 24, 4, 0.2, latent=True, indexer=IndexerShape(30))]
    store = open_kv_cache(layers, kv_dtype="float32", capacity_tokens=256, max_sequences=2)
    store.extend([0], [50])
    row, out = torch.zeros(1, layers[1].row_columns), torch.zeros(1, layers[1].out_columns)
    with pytest.raises(ValueError, match="expected the layers whose choice this one takes to attend before"):
        store.attend(1, [0], [1], row, out)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (LayerShape(1, 8, 8, 2, 1.0, window=9, latent=True, indexer=IndexerShape(4, 2, 8)), "there is no window"),
        (LayerShape(1, 8, 8, 2, 1.0, latent=True, indexer=IndexerShape(4)), "layer before it chose"),
        (LayerShape(1, 8, 8, 2, 1.0, latent=True, indexer=IndexerShape(4, 2)), "needs heads, dims"),
        (LayerShape(1, 8, 8, 2, 1.0, latent=True, indexer=IndexerShape(0, 2, 8)), "at least one token"),
        (LayerShape(1, 8, 8, 2, 1.0, latent=True, indexer=IndexerShape(6, 2, 8, 4)), "whole pools"),
    ],
)
def test_indexers_that_make_no_sense_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        open_kv_cache([wrong], kv_dtype="float32", capacity_tokens=64, max_sequences=1)


def test_index_keys_count_as_stored_bytes():
    plain = LayerShape(1, 576, 512, 128, 0.1, latent=True)
    chosen = LayerShape(1, 576, 512, 128, 0.1, latent=True, indexer=IndexerShape(2048, 64, 128))
    for kv_dtype, more in (("float32", 512), ("float16", 256), ("bfloat16", 256), ("int8", 256)):
        assert bytes_per_token([chosen], kv_dtype) - bytes_per_token([plain], kv_dtype) == more
        pooled = replace(chosen, indexer=replace(chosen.indexer, pool=16))
        assert bytes_per_token([pooled], kv_dtype) - bytes_per_token([plain], kv_dtype) == more / 16


def test_layers_that_take_a_choice_count_without_the_one_before():
    plain = LayerShape(1, 40, 24, 4, 0.2, latent=True)
    taking = LayerShape(1, 40, 24, 4, 0.2, latent=True, indexer=IndexerShape(30))
    assert bytes_per_token([taking, taking], "int8") == bytes_per_token([plain, plain], "int8")


@pytest.mark.parametrize("pool", [1, 8])
def test_forks_and_blocks_that_move_keep_index_keys(pool):
    batch = make_batch(shape(topk=40, pool=pool), [150], [1])
    out = forked_and_moved(batch)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
    assert torch.equal(out[:1], run_batch(batch, "float32", which=ints([0]).tolist()))
    assert np.isfinite(out.numpy()).all()
