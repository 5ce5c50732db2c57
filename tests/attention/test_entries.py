"""Attention to a window of tokens and to compressed entries of the earlier ones (DeepSeek-V4, section 2.3)."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.attention.base import LATENT_KV_DTYPES
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import IndexerShape, LayerShape
from hpcdecode.attention.sizes import bytes_per_token
from tests.support.attention_cases import answered, expected, forked_and_moved, make_batch, run_batch

LENGTHS, COUNTS = (1, 3, 63, 64, 129, 300, 2500), (1, 3, 60, 1, 2, 5, 1)
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 4e-2, "int8": 6e-2}


def shape(rate=4, topk=None, heads=5, window=24, q_heads=6, sinks=True):
    indexer = IndexerShape(topk, heads, 32) if topk else None
    return LayerShape(1, 80, 80, q_heads, 0.1, window, None, sinks, True, indexer, compress_rate=rate)


SHAPES = [shape(), shape(topk=10), shape(4, 1, 32, 130, 32), shape(64, sinks=False), shape(1, topk=7, window=1)]


@pytest.mark.parametrize("kv_dtype", LATENT_KV_DTYPES)
@pytest.mark.parametrize("which", SHAPES)
@pytest.mark.parametrize("block_tokens", [64, 128, 192])
def test_attends_to_the_window_and_to_entries(kv_dtype, which, block_tokens, isa):
    """Index products of bfloat16 are exact, so that all choose alike."""
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    batch, answer = answered(which, LENGTHS, COUNTS, dtype, kv_dtype)
    got = run_batch(batch, kv_dtype, block_tokens=block_tokens, threads=2).double()
    torch.testing.assert_close(got, answer, rtol=0, atol=TOLERANCE[kv_dtype])


@pytest.mark.parametrize(
    ("which", "block_tokens"), [(shape(4, 10), 4), (shape(128), 64), (shape(64), 16), (shape(3), 9)]
)
def test_entries_lie_in_blocks_of_their_last_token(which, block_tokens):
    batch = make_batch(which, LENGTHS, COUNTS)
    got = run_batch(batch, "float32", block_tokens=block_tokens).double()
    torch.testing.assert_close(got, expected(batch, "float32"), rtol=0, atol=1e-5)


def test_the_reference_attends_alike():
    for which in SHAPES:
        batch = make_batch(which, LENGTHS, COUNTS)
        for kv_dtype in LATENT_KV_DTYPES:
            got = run_batch(batch, kv_dtype, backend="reference").double()
            torch.testing.assert_close(got, expected(batch, kv_dtype), rtol=0, atol=1e-5)


@pytest.mark.parametrize("which", SHAPES)
def test_a_sequence_alone_is_a_sequence_in_company_token_by_token(which, isa):
    batch = make_batch(which, LENGTHS, COUNTS, torch.bfloat16)
    together = run_batch(batch, "bfloat16", threads=2)
    first = 0
    for i, count in enumerate(COUNTS):
        assert torch.equal(run_batch(batch, "bfloat16", which=[i]), together[first : first + count])
        store = open_kv_cache([which], kv_dtype="bfloat16", capacity_tokens=2560, max_sequences=1)
        old, rows = LENGTHS[i] - count, batch.rows[i]
        store.extend([0], [old])
        store.append(0, [0], [old], rows[:old, which.q_columns :].contiguous())
        for t in range(count):
            out = torch.empty(1, which.out_columns, dtype=torch.bfloat16)
            store.extend([0], [1])
            store.attend(0, [0], [1], rows[old + t : old + t + 1], out, batch.sinks)
            assert torch.equal(out[0], together[first + t])
        first += count


def test_forks_and_blocks_that_move_keep_entries():
    batch = make_batch(shape(4, 10), [151], [1])
    out = forked_and_moved(batch)
    assert torch.equal(out[:1], run_batch(batch, "float32"))
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (LayerShape(1, 8, 8, 2, 1.0, 4, compress_rate=4), "entries need a latent"),
        (LayerShape(1, 8, 8, 2, 1.0, latent=True, compress_rate=4), "with a window"),
        (LayerShape(1, 8, 8, 2, 1.0, 4, latent=True, compress_rate=-1), "must be positive"),
        (LayerShape(1, 8, 8, 2, 1.0, 4, latent=True, compress_rate=48), "multiple of compress_rate"),
        (LayerShape(1, 8, 8, 2, 1.0, 4, None, False, True, IndexerShape(4, 2, 8), compress_rate=128), "multiple of"),
        (LayerShape(1, 8, 8, 2, 1.0, 4, None, False, True, IndexerShape(4), compress_rate=4), "own indexer"),
    ],
)
def test_entries_that_make_no_sense_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        open_kv_cache([wrong], kv_dtype="float32", capacity_tokens=64, max_sequences=1)


def test_entries_count_as_stored_bytes():
    plain = LayerShape(1, 512, 512, 64, 0.1, 128, None, True, True)
    sparse = LayerShape(1, 512, 512, 64, 0.1, 128, None, True, True, IndexerShape(512, 64, 128), compress_rate=4)
    heavy = LayerShape(1, 512, 512, 64, 0.1, 128, None, True, True, compress_rate=128)
    assert bytes_per_token([sparse], "bfloat16") - bytes_per_token([plain], "bfloat16") == (1024 + 256) / 4
    assert bytes_per_token([heavy], "bfloat16") - bytes_per_token([plain], "bfloat16") == 1024 / 64  # one in each block
