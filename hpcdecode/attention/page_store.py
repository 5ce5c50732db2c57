"""The bytes of pages: from a tier to a frame of memory, and back, with checksums of blocks and records."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from hpcdecode._attn_cpu import KvCache, PageMove
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.errors import InvariantViolation
from hpcdecode.system.swap_tiers import ALIGNMENT, memory_for
from hpcdecode.system.tier import Chunk, Tier
from hpcdecode.system.tier_threads import THREADS


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
        self._journals: SimpleQueue[Chunk] = SimpleQueue()  # one for each thread
        for _ in range(THREADS if native else 0):
            self._journals.put(memory_for(max(sizes.journal_bytes, ALIGNMENT)))

    def read(self, move: PageMove) -> int:
        """Bring a page to its frame; return the bytes that were read.

        Args:
            move: What comes in.

        Raises:
            OSError: If it cannot be read, or is not what was written.
        """
        assert self._native is not None, "what is read has a KV cache"
        memory, (tier, place), (begin, end) = self._memory[move.frame], self.place(move.page), move.journal
        for at, stop in move.runs:
            tier.read(place, memory[at:stop], at)
        journal = self._journals.get()
        try:
            if end:
                tier.read(place, journal[begin:end], self.sizes.page_bytes + begin)
            if not self._native.unseal(move, journal):
                raise OSError(0, "what was read is not what was written")
        finally:
            self._journals.put(journal)
        return move.nbytes

    def write(self, move: PageMove) -> int:
        """Write what changed of a page that lies in a frame; return the bytes that were written.

        Args:
            move: What goes out; it takes the checksums.

        Raises:
            OSError: If it cannot be written.
        """
        assert self._native is not None, "what is written has a KV cache"
        memory, (tier, place), (begin, end) = self._memory[move.frame], self.place(move.page), move.journal
        journal = self._journals.get()
        try:
            self._native.seal(move, journal)
            for at, stop in move.runs:
                tier.write(place, memory[at:stop], at)
            if end:
                tier.write(place, journal[begin:end], self.sizes.page_bytes + begin)
        finally:
            self._journals.put(journal)
        return move.nbytes

    def place(self, page: tuple[int, int]) -> tuple[Tier, int]:
        """Return the tier of a page, given as layer and range, and its place there."""
        number = page[0] * self.sizes.ranges + page[1]
        for tier in self.tiers:
            if number < tier.chunks:
                return tier, number
            number -= tier.chunks
        raise InvariantViolation("every page has a place in a tier", f"page {page} has none")
