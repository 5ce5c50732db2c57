"""The bytes of pages: from a tier to a frame of memory, and back, with a checksum of every block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcdecode._attn_cpu import crc32c
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.errors import InvariantViolation
from hpcdecode.system.swap_tiers import ALIGNMENT
from hpcdecode.system.tier import Chunk, Tier

_GAP = 256 << 10  # bytes that are read along rather than left out

Marks = NDArray[np.bool_]
Run = tuple[int, int]  # begin and end, bytes of a page
Page = tuple[int, int]  # layer and range


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
        owner: What that memory lives as long as.
        tiers: In the order in which they are filled, with chunks of a page.
    """

    def __init__(self, sizes: PageSizes, frames: Sequence[Chunk], owner: object, tiers: Sequence[Tier]):
        self.sizes, self.tiers = sizes, list(tiers)
        self._memory, self._owner = list(frames), owner

    def read(self, page: Page, frame: int, blocks: Marks, sums: NDArray[np.uint32]) -> int:
        """Bring blocks of a page to a frame; return the bytes that were read.

        Args:
            page: Layer and range.
            frame: Number of the frame.
            blocks: bool [range_blocks].
            sums: uint32 [range_blocks], their checksums.

        Raises:
            OSError: If they cannot be read, or are not what was written.
        """
        memory, (tier, place) = self._memory[frame], self.place(page)
        runs = self.runs_read(blocks)
        for begin, end in runs:
            tier.read(place, memory[begin:end], begin)
        for block in np.flatnonzero(blocks).tolist():
            if crc32c(self._block(memory, block)) != sums[block]:
                raise OSError(0, "what was read is not what was written")
        return sum(end - begin for begin, end in runs)

    def write(self, page: Page, frame: int, blocks: Marks, sums: NDArray[np.uint32]) -> int:
        """Write blocks of a page that lies in a frame; return the bytes that were written.

        Args:
            page: Layer and range.
            frame: Number of the frame.
            blocks: bool [range_blocks].
            sums: uint32 [range_blocks], which takes their checksums.

        Raises:
            OSError: If they cannot be written.
        """
        memory, (tier, place) = self._memory[frame], self.place(page)
        for block in np.flatnonzero(blocks).tolist():
            sums[block] = crc32c(self._block(memory, block))
        runs = self.runs_written(blocks)
        for begin, end in runs:
            tier.write(place, memory[begin:end], begin)
        return sum(end - begin for begin, end in runs)

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
