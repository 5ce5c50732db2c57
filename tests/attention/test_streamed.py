"""A KV cache larger than its memory gives the bits of one that has all in memory, or says that it cannot."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
import torch

from hpcdecode.attention.base import KV_DTYPES, LATENT_KV_DTYPES, KvCapacityError
from hpcdecode.attention.row_groups import frames_of
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import ALIGNMENT
from tests.support.rotating import BLOCK_TOKENS, FaultyTier, file, host, rotating, sizes_of
from tests.support.streamed import SHAPES, CachePair


@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_are_those_of_a_cache_in_memory(tmp_path, kv_dtype, kind):
    sizes = sizes_of(SHAPES, kv_dtype, ranges=12, frames=18, blocks=6)
    cache = rotating(SHAPES, kv_dtype, sizes, host(sizes) if kind == "host" else file(sizes, tmp_path))
    pair = CachePair(cache, kv_dtype, torch.bfloat16 if kv_dtype == "bfloat16" else torch.float32)
    for _ in range(30):
        pair.random_step()
    counts = cache.pages.counts
    assert counts.bytes_in > 4 * sizes.frames * sizes.page_bytes and counts.bytes_out > 0
    assert not list(tmp_path.iterdir())
    pair.release(*pair.held)
    pair.caches[1].check()
    assert cache.used_tokens == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_the_least_memory_does(seed):
    """All pages of a layer, and what moves: a row may need every page."""
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=12 + 5)
    pair = CachePair(rotating(SHAPES, "float32", sizes, host(sizes)), "float32", seed=seed)
    pair.step({}, {0: 5 * BLOCK_TOKENS + 10})
    for slot in range(1, 6):
        pair.fork(0, slot)
    for _ in range(20):
        pair.step(dict.fromkeys(pair.held, 1))
    assert pair.caches[1].pages.counts.bytes_in > 0


def test_a_fixed_part_stays_and_clean_blocks_are_not_written_again():
    shapes = SHAPES[:1] * 8
    sizes = sizes_of(shapes, "float32", ranges=12, frames=36, blocks=8, journal=16 * ALIGNMENT)
    cache = rotating(shapes, "float32", sizes, host(sizes))
    pair = CachePair(cache, "float32")
    for slot in range(12):
        pair.step({}, {slot: 7 * BLOCK_TOKENS + 1})
    for _ in range(8):  # until all that moves was written once; journals have room for 16 steps
        pair.step(dict.fromkeys(pair.held, 1))
    before, steps = (cache.pages.counts.bytes_in, cache.pages.counts.bytes_out), 5
    for _ in range(steps):
        pair.step(dict.fromkeys(pair.held, 1))
    held = 12 * 8 * sizes.block_bytes * len(shapes)
    read, written = cache.pages.counts.bytes_in - before[0], cache.pages.counts.bytes_out - before[1]
    assert 0.6 * held * steps < read < 0.9 * held * steps  # of 8 pages a layer more than 2 stay
    newest = steps * 12 * len(shapes)  # blocks
    assert 0 < written <= 2 * newest * ALIGNMENT < newest * sizes.block_bytes / 2  # tokens, and not their blocks


def test_a_token_is_written_about_twice_until_its_block_is_full():
    """Rows of which every page has one: 100 steps with pages that move in each, over the end of a block."""
    shapes = [LayerShape(kv_heads=8, k_dim=64, v_dim=64, q_heads=8, scale=0.3)] * 4
    sizes = sizes_of(shapes, "float32", ranges=14, frames=20, journal=40 * ALIGNMENT)
    cache = rotating(shapes, "float32", sizes, host(sizes))
    pair = CachePair(cache, "float32")
    for slot in range(4):
        pair.step({}, {slot: 40})
    for _ in range(4):
        pair.step(dict.fromkeys(pair.held, 1))
    before, steps = cache.pages.counts.bytes_out, 100
    for _ in range(steps):
        pair.step(dict.fromkeys(pair.held, 1))
        cache.check()
    new = steps * 4 * sum(cache.native.row_bytes(layer) for layer in range(len(shapes)))
    assert 0.5 * new < cache.pages.counts.bytes_out - before < 4 * new  # whole blocks would be 64 times that


LATENT = LayerShape(kv_heads=1, k_dim=96, v_dim=64, q_heads=4, scale=0.1, latent=True)


@pytest.mark.parametrize(
    ("kv_dtype", "shape"),
    [*((dtype, SHAPES[0]) for dtype in KV_DTYPES), *((dtype, LATENT) for dtype in LATENT_KV_DTYPES)],
)
def test_saved_tokens_come_back_to_the_bit(kv_dtype, shape):
    sizes = sizes_of([shape], kv_dtype, ranges=4, frames=8, blocks=2)
    cache = rotating([shape], kv_dtype, sizes, host(sizes))
    draw = np.random.default_rng(1)
    kv, qkv = (
        torch.from_numpy(draw.standard_normal(s, np.float32)) for s in ((89, shape.kv_columns), (1, shape.row_columns))
    )
    cache.extend([0], [89])
    cache.append(0, [0], [89], kv)
    cache.extend([0], [1])

    def attended():
        out = torch.empty(1, shape.out_columns)
        cache.attend(0, [0], [1], qkv, out)
        return out

    expected, (frame,) = attended(), [f for f in cache.pages.frames(0) if f >= 0]
    row = cache.native.row_bytes(0)
    items = np.array([[0, 0, 64, 0], [1, 0, 20, 64 * row], [1, 20, 6, 84 * row]], np.int32).ravel()
    rows = np.zeros(90 * row, np.uint8)
    cache.native.save_tokens(0, frame, items, rows)
    frames_of(cache.native, sizes)[frame][:] = 0xFF  # NaN
    cache.native.restore_tokens(0, frame, items, rows)
    assert torch.equal(attended(), expected)
    of_others = [0, 60, 5, 0], [9, 0, 1, 0], [0, -1, 1, 0], [0, 0, 1, 90 * row], [0, 0, 1, -1], [0, 0]
    for bad in of_others:
        with pytest.raises(ValueError, match="expected"):
            cache.native.save_tokens(0, frame, np.array(bad, np.int32), rows)
    with pytest.raises(ValueError, match="frame: expected 0 to 7, got 8"):
        cache.native.restore_tokens(0, 8, items, rows)


def test_forks_whose_origin_goes_before_their_layers_are_written():
    """Slots are freed between a fork and the layers that its copies are made in, as another lane's plan does."""
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=18)
    pair = CachePair(rotating(SHAPES, "float32", sizes, host(sizes)), "float32")
    pair.step({}, {0: 70, 9: 100})
    pair.fork(0, 1)
    pair.fork(9, 2)
    for cache in pair.caches:
        cache.extend([1, 2, 0], [1, 1, 1])
        cache.release([0, 9])
    for slot in (0, 9):
        del pair.held[slot]
    for layer, shape in enumerate(SHAPES):
        pair.attend(layer, shape, {1: 1, 2: 1})
    pair.step({1: 1, 2: 1}, {3: 200})
    pair.caches[1].check()


def test_what_fits_in_memory_never_moves():
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=18, blocks=8)
    cache = rotating(SHAPES, "float32", sizes, host(sizes))
    pair = CachePair(cache, "float32")
    for _ in range(3):
        for slot in range(8):
            pair.step({}, {slot: 3 * BLOCK_TOKENS})
        for _ in range(4):
            pair.step(dict.fromkeys(pair.held, 1))
        pair.release(*pair.held)
    assert cache.pages.counts.bytes_in == cache.pages.counts.bytes_out == 0


@pytest.mark.parametrize(("fault", "why"), [("write", "No space left"), ("read", "Input/output"), ("bits", "written")])
def test_what_a_tier_loses_is_an_error_and_never_a_row(fault, why):
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=18, blocks=6)
    (tier,) = host(sizes, FaultyTier)
    tier.fault, tier.after = fault, 20
    pair = CachePair(rotating(SHAPES, "float32", sizes, [tier]), "float32")
    with pytest.raises(UserError, match=rf"--kv-swap: pages of the KV cache cannot be moved: .*{why}.*run the same"):
        for _ in range(200):
            pair.random_step()
    with pytest.raises(UserError):  # and so do all that follow
        pair.caches[1].attend(0, [0], [0], torch.zeros(0, 256 + 192), torch.zeros(0, 128))
        pair.step({slot: 1 for slot in pair.held})


def test_bad_arguments_change_nothing():
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=18)
    cache = rotating(SHAPES, "float32", sizes, host(sizes))
    cache.extend([3], [70])
    shape = SHAPES[0]
    qkv, out = torch.zeros(1, shape.row_columns), torch.zeros(1, shape.out_columns)
    for call in (
        lambda: cache.attend(7, [3], [1], qkv, out),
        lambda: cache.attend(0, [4], [1], qkv, out),
        lambda: cache.attend(0, [3], [71], qkv, out),
        lambda: cache.attend(0, [3], [2], qkv, out),
        lambda: cache.attend(0, [3], [1], qkv, torch.zeros(2, shape.out_columns)),
        lambda: cache.attend(0, [3], [1], qkv[:, 1:], out),
        lambda: cache.append(0, [3, 3], [1, 1], torch.zeros(2, shape.kv_columns)),
        lambda: cache.truncate(3, 71),
        lambda: cache.release([4]),
    ):
        with pytest.raises(ValueError, match=r"expected|slot"):
            call()
    with pytest.raises(KvCapacityError, match="KV cache full"):
        cache.extend([5], [cache.capacity_tokens])
    cache.check()
    assert cache.length(3) == 70 and not cache.pages.any_pinned


def test_threads_and_files_end_with_the_cache(tmp_path):
    gc.collect()  # what other tests left
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=18)
    pair = CachePair(rotating(SHAPES, "float32", sizes, file(sizes, tmp_path)), "float32")
    for _ in range(10):
        pair.random_step()
    assert threading.active_count() > threads
    del pair
    gc.collect()
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == files
