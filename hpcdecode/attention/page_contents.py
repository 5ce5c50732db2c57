"""What a tier has of every page, and what of it is in memory alone.

Most of what changes are single tokens at the ends of sequences. They go to the journal of their page, which lies behind
its blocks in the tier, as records of tokens. A block is written as a whole if its sequence has filled it, if more than
single tokens changed, and if a journal is full. So every token is written about twice, however often its page moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.system.swap_tiers import aligned

Marks = NDArray[np.bool_]
Page = tuple[int, int]  # layer and range
_NONE = np.iinfo(np.int32).max


@dataclass(slots=True)
class SavedTokens:
    """Tokens of a page that are written at once.

    Attributes:
        items: int32 [n, 4], a block of the page, its first token, how many, and where in the journal they begin.
        ages: int32 [n], of the blocks then.
        at: Byte of the journal at which they begin.
        nbytes: That they take, aligned for tiers.
        checksum: Of these bytes.
    """

    items: NDArray[np.int32]
    ages: NDArray[np.int32]
    at: int
    nbytes: int
    checksum: int = 0


@dataclass(slots=True)
class Journal:
    """The records of a page, and their items together."""

    records: list[SavedTokens]
    items: NDArray[np.int32]
    ages: NDArray[np.int32]

    @property
    def end(self) -> int:
        """Return the bytes of the journal that are in use."""
        return self.records[-1].at + self.records[-1].nbytes if self.records else 0

    def with_record(self, record: SavedTokens) -> Journal:
        """Return the journal with one record more."""
        items, ages = np.concatenate((self.items, record.items)), np.concatenate((self.ages, record.ages))
        return Journal([*self.records, record], items, ages)


_EMPTY = Journal([], np.zeros((0, 4), np.int32), np.zeros(0, np.int32))


@dataclass(slots=True)
class PageRead:
    """What comes in of a page.

    Attributes:
        blocks: bool [range_blocks], those that come as a whole.
        sums: uint32 [range_blocks], their checksums.
        journal: What comes behind them, without items of blocks that are free by now.
    """

    blocks: Marks
    sums: NDArray[np.uint32]
    journal: Journal


@dataclass(slots=True)
class PageWrite:
    """What goes out of a page.

    Attributes:
        blocks: bool [range_blocks], those that go as a whole.
        sums: uint32 [range_blocks], which takes their checksums.
        record: Tokens of others, or None.
    """

    blocks: Marks
    sums: NDArray[np.uint32]
    record: SavedTokens | None = None


class PageContents:
    """The blocks of all pages: which of them sequences hold, what changed, and what tiers have.

    Args:
        sizes: Of pages.
        row_bytes: Bytes of a token at every layer.

    Attributes:
        has: bool [layers, ranges], pages of which tiers have something that sequences hold.
        live: bool [ranges, range_blocks], blocks that sequences hold.
    """

    def __init__(self, sizes: PageSizes, row_bytes: Sequence[int]):
        self._sizes, self._row_bytes = sizes, list(row_bytes)
        blocks = sizes.layers, sizes.ranges, sizes.range_blocks
        self._dirty = np.zeros(blocks, np.bool_)  # differ as a whole from what tiers have
        self._stored = np.zeros(blocks, np.bool_)  # tiers have them, but for the tokens that follow
        self._first = np.full(blocks, _NONE, np.int32)  # first token that tiers lack
        self._end = np.zeros(blocks, np.int32)  # and the one behind the last; 0 if there are none
        self._whole = np.zeros(blocks, np.bool_)  # of those stored: not in the journal alone
        self._sums = np.zeros(blocks, np.uint32)
        self._age = np.zeros(blocks, np.int32)  # counts how often records became void
        self._journals: dict[Page, Journal] = {}
        self.live = np.zeros(blocks[1:], np.bool_)
        self.has = np.zeros(blocks[:2], np.bool_)

    def set_live(self, live: Marks) -> bool:
        """Say which blocks sequences hold; return whether any became free. What those held is forgotten."""
        gone = self.live & ~live
        self.live = live.copy()
        if not gone.any():
            return False
        self._dirty[:, gone] = self._stored[:, gone] = self._whole[:, gone] = False
        self._first[:, gone], self._end[:, gone] = _NONE, 0
        self._age[:, gone] += 1
        of = gone.any(1)
        self.has[:, of] = (self._stored[:, of] & live[of]).any(2)
        return True

    def wrote(self, layer: int, blocks: Sequence[int] | NDArray[np.integer]) -> None:
        """Note that blocks changed, whatever of them."""
        parts, places = np.divmod(np.asarray(blocks, np.int64), self._sizes.range_blocks)
        at = layer, parts, places
        self._dirty[at], self._stored[at], self._whole[at] = True, False, False
        self._first[at], self._end[at] = _NONE, 0
        self._age[at] += 1
        of = np.unique(parts)
        self.has[layer, of] = (self._stored[layer, of] & self.live[of]).any(1)

    def grew(self, layer: int, blocks: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Note that blocks changed by one token each.

        Args:
            layer: Of the blocks.
            blocks: int32 [n].
            tokens: int32 [n], tokens of the blocks.
        """
        parts, places = np.divmod(blocks.astype(np.int64), self._sizes.range_blocks)
        at = layer, parts, places
        dirty = self._dirty[at]
        known = self._stored[at] | (self._end[at] > 0) | (tokens == 0)
        if (lost := ~(dirty | known)).any():
            self.wrote(layer, blocks[lost])
        grown = known & ~dirty
        at = layer, parts[grown], places[grown]
        self._first[at] = np.minimum(self._first[at], tokens[grown])
        self._end[at] = np.maximum(self._end[at], tokens[grown] + 1)

    def unsaved(self, page: Page) -> bool:
        """Return whether memory alone has something of a page."""
        return bool(((self._dirty[page] | (self._end[page] > 0)) & self.live[page[1]]).any())

    def begin_writing(self, page: Page) -> PageWrite:
        """Return what goes out of a page; nothing of it changes until `was_written`, but blocks may become free."""
        live = self.live[page[1]]
        self._mark(page, live & (self._end[page] >= self._sizes.block_tokens))
        self._mark(page, live & self._beside_dirty(page))
        record = self._record(page)
        if record is not None and record.at + record.nbytes > self._sizes.journal_bytes:
            marks = self._end[page] > 0
            marks[self._journal(page).items[:, 0]] = True
            self._mark(page, marks & live)
            self._journals.pop(page, None)
            record = None
        return PageWrite(self._dirty[page] & live, np.zeros(self._sizes.range_blocks, np.uint32), record)

    def was_written(self, page: Page, write: PageWrite) -> None:
        """Note that tiers have what `begin_writing` returned; some blocks may have been given to others meanwhile."""
        kept = write.blocks & self._dirty[page]
        self._sums[page][kept] = write.sums[kept]
        self._stored[page][kept], self._whole[page][kept], self._dirty[page][kept] = True, True, False
        if write.record is not None:
            blocks = write.record.items[:, 0]
            blocks = blocks[write.record.ages == self._age[page][blocks]]
            self._stored[page][blocks], self._first[page][blocks], self._end[page][blocks] = True, _NONE, 0
            self._journals[page] = self._journal(page).with_record(write.record)
        self.has[page] = (self._stored[page] & self.live[page[1]]).any()

    def begin_reading(self, page: Page) -> PageRead:
        """Return what comes in of a page."""
        blocks = self._stored[page] & self.live[page[1]] & self._whole[page]
        return PageRead(blocks, self._sums[page].copy(), self._journal(page))

    def lost(self, held: Marks) -> int:
        """Return how many blocks are neither in tiers nor in memory as a whole, or seem to be in both.

        Args:
            held: bool [layers, ranges], pages that lie in memory.
        """
        only_here = self._dirty | (self._end > 0)
        return int((only_here & ~held[:, :, None]).sum() + (self._dirty & self._stored).sum())

    def _mark(self, page: Page, marks: Marks) -> None:
        """Have blocks written as a whole."""
        if marks.any():
            self.wrote(page[0], np.flatnonzero(marks) + page[1] * self._sizes.range_blocks)

    def _beside_dirty(self, page: Page) -> Marks:
        """Return the blocks that grew since they were written, and that writing dirty ones would write a part of."""
        grew = self._end[page] > 0
        grew[self._journal(page).items[:, 0]] = True
        written = (self._dirty[page] & self.live[page[1]]).reshape(-1, self._sizes.blocks_together).any(1)
        beside: Marks = grew & self._whole[page] & np.repeat(written, self._sizes.blocks_together)
        return beside

    def _record(self, page: Page) -> SavedTokens | None:
        """Return the tokens that tiers lack of blocks that grew, behind the page's journal; None if there are none."""
        blocks = np.flatnonzero(self.live[page[1]] & (self._end[page] > 0))
        if not len(blocks):
            return None
        first, at, row = self._first[page][blocks], self._journal(page).end, self._row_bytes[page[0]]
        counts = self._end[page][blocks] - first
        ends = np.cumsum(counts) * row
        items = np.stack((blocks, first, counts, at + ends - counts * row), 1).astype(np.int32)
        return SavedTokens(items, self._age[page][blocks], at, aligned(int(ends[-1])))

    def _journal(self, page: Page) -> Journal:
        """Return the journal of a page without items of blocks that were freed or written as a whole since."""
        journal = self._journals.get(page, _EMPTY)
        valid = journal.ages == self._age[page][journal.items[:, 0]]
        if valid.all():
            return journal
        if valid.any():
            journal = self._journals[page] = Journal(journal.records, journal.items[valid], journal.ages[valid])
            return journal
        del self._journals[page]
        return _EMPTY
