"""A KV cache larger than its memory gives the bits of one that has all in memory, or says that it cannot."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
import torch

from hpcdecode.attention.base import KV_DTYPES, LATENT_KV_DTYPES, KvCapacityError
from hpcdecode.attention.block_copies import due_copies
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.page_sizes import PageSizes, page_sizes
from hpcdecode.attention.pages import page_table
from hpcdecode.attention.row_groups import frames_of
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import ALIGNMENT
from tests.support.rotating import BLOCK_TOKENS, FaultyTier, file, host, rotating, sizes_of

SHAPES = [
    LayerShape(kv_heads=2, k_dim=64, v_dim=32, q_heads=4, scale=0.3),
    LayerShape(kv_heads=4, k_dim=64, v_dim=64, q_heads=4, scale=0.1, window=70),
    LayerShape(kv_heads=2, k_dim=64, v_dim=32, q_heads=4, scale=0.3, sinks=True),
]
SLOTS = 16


class Pair:
    """Does the same to two KV caches, and compares what they give.

    Args:
        streamed: KV cache that is larger than its memory.
        kv_dtype: Data type of K and V.
        dtype: Of rows.
    """

    def __init__(self, streamed, kv_dtype, dtype=torch.float32, seed=0):
        capacity = streamed.capacity_tokens
        sizes = {"kv_dtype": kv_dtype, "capacity_tokens": capacity, "block_tokens": BLOCK_TOKENS}
        plain = open_kv_cache(streamed.layers, **sizes, max_sequences=SLOTS, threads=2)
        self.caches = plain, streamed
        self.draw, self.dtype, self.held = np.random.default_rng(seed), dtype, {}

    def _rows(self, tokens, columns):
        return torch.from_numpy(self.draw.standard_normal((tokens, columns), np.float32)).to(self.dtype)

    def step(self, counts, appended=()):
        """Attend to so many new tokens by slot, after those of `appended` slots are only appended."""
        for cache in self.caches:
            for some in (counts, dict(appended)):
                if some:
                    cache.extend(list(some), list(some.values()))
        for some in (counts, dict(appended)):
            for slot, count in some.items():
                self.held[slot] = self.held.get(slot, 0) + count
        for layer, shape in enumerate(self.caches[0].layers):
            for slot, count in dict(appended).items():
                kv = self._rows(count, shape.kv_columns)
                for cache in self.caches:
                    cache.append(layer, [slot], [count], kv)
            if counts:
                self._attend(layer, shape, counts)

    def _attend(self, layer, shape, counts):
        slots = list(counts)
        self.draw.shuffle(slots)
        tokens = [counts[slot] for slot in slots]
        qkv = self._rows(sum(tokens), shape.row_columns)
        sinks = torch.linspace(-1, 1, shape.q_heads) if shape.sinks else None
        outs = [torch.full((sum(tokens), shape.out_columns), torch.nan, dtype=self.dtype) for _ in self.caches]
        for cache, out in zip(self.caches, outs, strict=True):
            cache.attend(layer, slots, np.array(tokens, np.int32), qkv, out, sinks)
        assert torch.equal(*outs) and not outs[0].isnan().any()

    def release(self, *slots):
        for cache in self.caches:
            cache.release(list(slots))
        for slot in slots:
            del self.held[slot]

    def fork(self, src, dst):
        for cache in self.caches:
            cache.fork(src, dst)
        self.held[dst] = self.held[src]

    def truncate(self, slot, length):
        for cache in self.caches:
            cache.truncate(slot, length)
        self.held[slot] = length

    def random_step(self):
        """Do something drawn to some slots, and let most of the others decode."""
        free = [slot for slot in range(SLOTS) if slot not in self.held]
        room = min(cache.free_blocks for cache in self.caches) - 2 * SLOTS
        if self.held and (self.draw.random() < 0.2 or room < 4):
            self.release(*self.draw.permutation(list(self.held))[: 1 + (room < 4) * 4].tolist())
        elif self.held and free and self.draw.random() < 0.3:
            self.fork(int(self.draw.choice(list(self.held))), free.pop(0))
        elif self.held and self.draw.random() < 0.2:
            slot = int(self.draw.choice(list(self.held)))
            self.truncate(slot, int(self.draw.integers(1, self.held[slot] + 1)))
        long = min(300, room * BLOCK_TOKENS // 2)
        appended = {free[0]: int(self.draw.integers(1, long))} if free and long > 1 else {}
        decode = {slot: 1 for slot in self.held if self.draw.random() < 0.9}
        if decode and self.draw.random() < 0.3:
            decode[next(iter(decode))] = 3
        self.step(decode, appended)
        for cache in self.caches:
            cache.check()


@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_are_those_of_a_cache_in_memory(tmp_path, kv_dtype, kind):
    sizes = sizes_of(SHAPES, kv_dtype, ranges=12, frames=18, blocks=6)
    cache = rotating(SHAPES, kv_dtype, sizes, host(sizes) if kind == "host" else file(sizes, tmp_path))
    pair = Pair(cache, kv_dtype, torch.bfloat16 if kv_dtype == "bfloat16" else torch.float32)
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
    pair = Pair(rotating(SHAPES, "float32", sizes, host(sizes)), "float32", seed=seed)
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
    pair = Pair(cache, "float32")
    for slot in range(12):
        pair.step({}, {slot: 7 * BLOCK_TOKENS + 1})
    for _ in range(4):  # until all that moves was written once
        pair.step(dict.fromkeys(pair.held, 1))
    before, steps = (cache.pages.counts.bytes_in, cache.pages.counts.bytes_out), 5
    for _ in range(steps):
        pair.step(dict.fromkeys(pair.held, 1))
    held = 12 * 8 * sizes.block_bytes * len(shapes)
    read, written = cache.pages.counts.bytes_in - before[0], cache.pages.counts.bytes_out - before[1]
    assert 0.6 * held * steps < read < 0.9 * held * steps  # of 8 pages a layer more than 2 stay
    assert 0 < written <= steps * 12 * len(shapes) * ALIGNMENT  # a token of each row, and not its newest block


def test_a_token_is_written_about_twice_until_its_block_is_full():
    """Rows of which every page has one: 100 steps with pages that move in each, over the end of a block."""
    shapes = [LayerShape(kv_heads=8, k_dim=64, v_dim=64, q_heads=8, scale=0.3)] * 4
    sizes = sizes_of(shapes, "float32", ranges=14, frames=20, journal=40 * ALIGNMENT)
    cache = rotating(shapes, "float32", sizes, host(sizes))
    pair = Pair(cache, "float32")
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


class OnePage:
    """A table of two pages of one layer with a frame for one of them: the first goes when the second is needed.

    Args:
        blocks: Of a page.
    """

    FIRST, SECOND = np.array([1, 0], np.uint8), np.array([0, 1], np.uint8)

    def __init__(self, blocks=1, block_bytes=3 * ALIGNMENT):
        sizes = PageSizes(1, block_bytes, blocks, 2, 1, 1, 4 * ALIGNMENT, BLOCK_TOKENS)
        self.table, self.blocks = page_table(sizes, [768]), blocks
        self.live(*range(blocks))

    def live(self, *blocks):
        """Let sequences hold some blocks of the first page."""
        marks = np.zeros(2 * self.blocks, np.uint8)
        marks[list(blocks)] = 1
        self.table.set_live(marks)

    def begin(self):
        """Have the first page come in; return what is read, or None."""
        moves = self.table.pin(0, self.FIRST)
        for move in moves:
            self.table.was_moved(move)
        return moves[0] if moves else None

    def end(self):
        """Have the first page go; return what is written, or None."""
        assert not self.table.unpin(0, self.FIRST)
        moves = self.table.pin(0, self.SECOND)
        for move in moves:
            self.table.was_moved(move)
            assert not self.table.pump()
        assert not self.table.broken()
        self.come_in = self.table.unpin(0, self.SECOND)
        for move in self.come_in:  # ahead of its use
            self.table.was_moved(move)
        return moves[0] if moves else None

    def grown(self, *tokens, block=0):
        """Let a block grow by tokens, each at a time; return what is written of the page, and what comes in."""
        self.begin()
        for token in tokens:
            self.table.grew(0, [block], [token])
        write = self.end()
        return write, (self.come_in[0] if self.come_in else None)


def test_a_journal_holds_nothing_of_blocks_that_others_have_by_now():
    """A row whose tokens lie in a journal ends, another takes its block, and grows in it."""
    page = OnePage()
    write, _ = page.grown(0, 1)
    assert write.items == [[0, 0, 2, 0]] and write.writes and not write.blocks and write.journal == (0, ALIGNMENT)
    write, read = page.grown(2)
    assert write.items == [[0, 2, 1, ALIGNMENT]] and write.nbytes == ALIGNMENT and not read.writes
    assert not read.blocks and [item[1] for item in read.items] == [0, 2] and read.journal == (0, 2 * ALIGNMENT)
    page.live()
    page.live(0)
    assert page.begin() is None and page.end() is None and not page.come_in
    write, read = page.grown(0)
    assert write.journal == (0, ALIGNMENT) and read.items == [[0, 0, 1, 0]]
    for token in range(1, 4):
        page.grown(token)
    whole, read = page.grown(4)  # the journal is full
    assert whole.journal == (0, 0) and whole.blocks == [0] and whole.nbytes == 3 * ALIGNMENT
    assert read.blocks == [0] and read.journal == (0, 0)
    write, read = page.grown(63)  # the block is full
    assert write.blocks == read.blocks == [0] and not read.items
    assert page.begin() is None and page.end() is None  # nothing is new


def test_a_block_that_is_freed_while_it_is_written_is_not_the_next_ones():
    page = OnePage()
    page.begin()
    page.table.wrote(0, [0])
    page.table.unpin(0, page.FIRST)
    (move,) = page.table.pin(0, page.SECOND)
    page.live()
    page.live(0)
    page.table.was_moved(move)
    page.table.pump()
    assert not page.table.unpin(0, page.SECOND) and not page.table.broken()
    assert page.begin() is None


def test_tables_refuse_what_pages_have_not():
    table = OnePage().table
    marks = np.zeros(3, np.uint8)
    for call, expected in (
        (lambda: table.pin(1, marks[:2]), "layer: expected 0 to 0, got 1"),
        (lambda: table.pin(0, marks), "parts: expected 2 bytes, got 3"),
        (lambda: table.set_live(marks), "live: expected 2 bytes, got 3"),
        (lambda: table.find_able(0, marks, marks[:1]), "needs: expected 2 bytes, got 3"),
        (lambda: table.wrote(0, [2]), "blocks: expected 0 to 1, got 2"),
        (lambda: table.grew(0, [0, 1], [0]), "tokens: expected one for each of 2 blocks, got 1"),
        (lambda: page_table(PageSizes(1, 512, 3, 2, 1, 1, 4096, 64), [768]), "range_blocks: expected a multiple of 8"),
        (lambda: page_table(PageSizes(1, 4096, 3, 2, 0, 1, 4096, 64), [768]), "expected 1 at least, got 0 and 1"),
    ):
        with pytest.raises(ValueError, match=expected):
            call()


def test_copies_of_forks_wait_until_their_blocks_are_given_to_others():
    """Copies (0 to 4) to (4 to 5), and (2 to 6): what is freed is copied first, with what that depends on."""
    held = np.ones(8, np.bool_)
    copies = [(0, 4), (4, 5), (2, 6)]
    assert due_copies(copies, held) == ([], copies)
    held[0] = False
    assert due_copies(copies, held) == ([(0, 4)], copies[1:])
    held[:] = True
    held[4] = False
    assert due_copies(copies, held) == ([(0, 4), (4, 5)], [(2, 6)])
    held[5] = False
    assert due_copies(copies, held) == ([], [(2, 6)])


def test_forks_whose_origin_goes_before_their_layers_are_written():
    """Slots are freed between a fork and the layers that its copies are made in, as another lane's plan does."""
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=18)
    pair = Pair(rotating(SHAPES, "float32", sizes, host(sizes)), "float32")
    pair.step({}, {0: 70, 9: 100})
    pair.fork(0, 1)
    pair.fork(9, 2)
    for cache in pair.caches:
        cache.extend([1, 2, 0], [1, 1, 1])
        cache.release([0, 9])
    for slot in (0, 9):
        del pair.held[slot]
    for layer, shape in enumerate(SHAPES):
        pair._attend(layer, shape, {1: 1, 2: 1})
    pair.step({1: 1, 2: 1}, {3: 200})
    pair.caches[1].check()


def test_what_fits_in_memory_never_moves():
    sizes = sizes_of(SHAPES, "float32", ranges=12, frames=18, blocks=8)
    cache = rotating(SHAPES, "float32", sizes, host(sizes))
    pair = Pair(cache, "float32")
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
    pair = Pair(rotating(SHAPES, "float32", sizes, [tier]), "float32")
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
    pair = Pair(rotating(SHAPES, "float32", sizes, file(sizes, tmp_path)), "float32")
    for _ in range(10):
        pair.random_step()
    assert threading.active_count() > threads
    del pair
    gc.collect()
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == files


def test_pages_have_a_mebibyte_where_memory_has_room_for_some_a_layer():
    shapes = [LayerShape(kv_heads=8, k_dim=128, v_dim=128, q_heads=32, scale=0.1)] * 32
    sizes = page_sizes(shapes, "bfloat16", 64, 1 << 30, [4 << 30])
    assert sizes.page_bytes >= 1 << 20 and sizes.frames * sizes.page_bytes <= 1 << 30
    assert sizes.ranges * sizes.layers * sizes.chunk_bytes <= 4 << 30 and 0.25 < sizes.resident_share < 0.35
    small = page_sizes(shapes[:2], "int8", 64, 3 << 20, [16 << 20])
    assert small.page_bytes < 1 << 20 and small.frames >= small.ranges + 2 * small.window
    widest = page_sizes(shapes, "bfloat16", 64, 1 << 30, [1 << 40])
    assert widest.frames >= widest.ranges + 2 * widest.window


@pytest.mark.parametrize(
    ("layers", "memory", "tier", "problem"),
    [
        (4, 1 << 20, 1 << 30, "expected --kv-memory of at least"),
        (4, 1 << 30, 1 << 29, "expected --kv-swap of more than"),
        (2, 8 << 20, 1 << 30, "expected --kv-memory of about 16M, to hold all pages of one of 2 layers at once"),
        (1, 1 << 30, 1 << 40, "expected a model of two layers or more"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(layers, memory, tier, problem):
    shapes = [LayerShape(kv_heads=8, k_dim=128, v_dim=128, q_heads=32, scale=0.1)] * layers
    with pytest.raises(UserError, match=problem):
        page_sizes(shapes, "bfloat16", 64, memory, [tier])


def test_runs_are_aligned_and_joined():
    """Of blocks that are written; what lies between those that are read is read along."""
    far = 300 * 1024 // 1536 // 8 * 8

    def moved(block_bytes, *blocks):
        page = OnePage(2 * far + 16, block_bytes)
        page.begin()
        page.table.wrote(0, list(blocks))
        return page.end().runs, page.come_in[0].runs

    assert moved(4096, 0, 1, 4) == ([(0, 8192), (16384, 20480)], [(0, 20480)])
    assert moved(1536, 0, 1, 4) == ([(0, 8192)], [(0, 8192)])
    begin = far * 1536
    assert moved(1536, 0, 2 * far) == ([(0, 4096), (2 * begin, 2 * begin + 4096)],) * 2


def test_a_page_has_the_frames_bytes():
    sizes = PageSizes(2, 4096, 3, 8, 16, 2, 4096, 64)
    assert (sizes.page_bytes, sizes.chunk_bytes) == (12288, 16384)
