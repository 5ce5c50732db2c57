"""The bytes of pages: from a tier to a frame of memory, and back, with checksums of blocks and records."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np

from hpcdecode._attn_cpu import KvCache, crc32c
from hpcdecode.attention.page_contents import Journal, Marks, Page, PageRead, PageWrite, SavedTokens
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.errors import InvariantViolation
from hpcdecode.system.swap_tiers import ALIGNMENT, memory_for
from hpcdecode.system.tier import Chunk, Tier
from hpcdecode.system.tier_threads import THREADS

_GAP = 256 << 10  # bytes that are read along rather than left out

Run = tuple[int, int]  # begin and end, bytes of a page


def runs_of(marks: Marks, block_bytes: int, gap: int = 0) -> list[Run]:
    """Return the bytes of marked blocks as runs, aligned for tiers; those less than `gap` bytes apart are joined."""
    runs: list[Run] = []
    for block in np.flatnonzero(marks).tolist():
        begin = block * block_bytes // ALIGNMENT * ALIGNMENT
        end = -(-(block + 1) * block_bytes // ALIGNMENT) * ALIGNMENT
        if runs and begin - runs[-1][1] <= gap:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return runs


class PageStore:
    """Frames and tiers.

    Args:
        sizes: Of pages.
        frames: Memory of every frame, uint8.
        native: The KV cache whose memory that is; None if there is none.
        tiers: In the order in which they are filled, with chunks of a page and its journal.
        row_bytes: Bytes of a token at every layer.

    Attributes:
        row_bytes: The same.
    """

    def __init__(
        self,
        sizes: PageSizes,
        frames: Sequence[Chunk],
        native: KvCache | None,
        tiers: Sequence[Tier],
        row_bytes: Sequence[int],
    ):
        self.sizes, self.tiers, self.row_bytes = sizes, list(tiers), list(row_bytes)
        self._memory, self._native = list(frames), native
        self._buffers: SimpleQueue[Chunk] = SimpleQueue()  # one for each thread, for journals
        for _ in range(THREADS if native else 0):
            self._buffers.put(memory_for(max(sizes.journal_bytes, ALIGNMENT)))

    def read(self, page: Page, frame: int, wanted: PageRead) -> int:
        """Bring blocks of a page to a frame; return the bytes that were read.

        Args:
            page: Layer and range.
            frame: Number of the frame.
            wanted: What comes in.

        Raises:
            OSError: If it cannot be read, or is not what was written.
        """
        memory, (tier, place) = self._memory[frame], self.place(page)
        for begin, end in self.runs_read(wanted.blocks):
            tier.read(place, memory[begin:end], begin)
        for block in np.flatnonzero(wanted.blocks).tolist():
            _require_same(self._block(memory, block), int(wanted.sums[block]))
        if wanted.journal.end:
            self._read_journal(page, frame, wanted.journal)
        return self.bytes_read(wanted)

    def write(self, page: Page, frame: int, given: PageWrite) -> int:
        """Write what changed of a page that lies in a frame; return the bytes that were written.

        Args:
            page: Layer and range.
            frame: Number of the frame.
            given: What goes out; it takes the checksums.

        Raises:
            OSError: If it cannot be written.
        """
        memory, (tier, place) = self._memory[frame], self.place(page)
        for block in np.flatnonzero(given.blocks).tolist():
            given.sums[block] = crc32c(self._block(memory, block))
        for begin, end in self.runs_written(given.blocks):
            tier.write(place, memory[begin:end], begin)
        if given.record is not None:
            self._write_record(page, frame, given.record)
        return self.bytes_written(given)

    def bytes_read(self, wanted: PageRead) -> int:
        """Return the bytes that are read for what comes in."""
        return sum(end - begin for begin, end in self.runs_read(wanted.blocks)) + wanted.journal.end

    def bytes_written(self, given: PageWrite) -> int:
        """Return the bytes that are written for what goes out."""
        blocks = sum(end - begin for begin, end in self.runs_written(given.blocks))
        return blocks + (given.record.nbytes if given.record else 0)

    def runs_read(self, blocks: Marks) -> list[Run]:
        """Return the runs of a page that are read for some blocks."""
        return runs_of(blocks, self.sizes.block_bytes, _GAP)

    def runs_written(self, blocks: Marks) -> list[Run]:
        """Return the runs of a page that are written for some blocks."""
        return runs_of(blocks, self.sizes.block_bytes)

    def place(self, page: Page) -> tuple[Tier, int]:
        """Return the tier of a page and its place there."""
        number = page[0] * self.sizes.ranges + page[1]
        for tier in self.tiers:
            if number < tier.chunks:
                return tier, number
            number -= tier.chunks
        raise InvariantViolation("every page has a place in a tier", f"page {page} has none")

    def _block(self, memory: Chunk, block: int) -> Chunk:
        size = self.sizes.block_bytes
        return memory[block * size : (block + 1) * size]

    def _write_record(self, page: Page, frame: int, record: SavedTokens) -> None:
        """Write tokens of a page to its journal."""
        assert self._native is not None, "what is written has a KV cache"
        tier, place = self.place(page)
        buffer = self._buffers.get()
        try:
            self._native.save_tokens(page[0], frame, record.items.ravel(), buffer)
            some = buffer[record.at : record.at + record.nbytes]
            record.checksum = crc32c(some)
            tier.write(place, some, self.sizes.page_bytes + record.at)
        finally:
            self._buffers.put(buffer)

    def _read_journal(self, page: Page, frame: int, journal: Journal) -> None:
        """Read a page's journal, and restore the tokens of its items."""
        assert self._native is not None, "what is restored has a KV cache"
        tier, place = self.place(page)
        buffer = self._buffers.get()
        try:
            tier.read(place, buffer[: journal.end], self.sizes.page_bytes)
            for record in journal.records:
                _require_same(buffer[record.at : record.at + record.nbytes], record.checksum)
            self._native.restore_tokens(page[0], frame, journal.items.ravel(), buffer)
        finally:
            self._buffers.put(buffer)


def _require_same(data: Chunk, checksum: int) -> None:
    if crc32c(data) != checksum:
        raise OSError(0, "what was read is not what was written")
