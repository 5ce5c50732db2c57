"""Pages of a KV cache that rotate: their sizes, what a journal holds, and what is copied, written and read at once."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.attention.block_copies import due_copies
from hpcdecode.attention.page_sizes import PageSizes, page_sizes
from hpcdecode.attention.pages import page_table
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import ALIGNMENT
from tests.support.rotating import BLOCK_TOKENS


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
