"""The bytes of pages of a GPU: from a tier to a frame of its memory, and back, with checksums of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from hpcdecode._attn_cpu import PageMove
from hpcdecode.attention.frame_copies import FrameCopies
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.page_store import PageStore
from hpcdecode.system.swap_tiers import HostTier
from hpcdecode.system.tier import Chunk, Tier
from hpcdecode.system.tier_threads import THREADS


class DevicePageStore(PageStore):
    """Frames of a GPU, and tiers. Pages have no journals: blocks that grew are written as a whole.

    The GPU copies to and from the memory of a `HostTier`, which should be pinned; for others there is memory between.

    Args:
        sizes: Of pages, whose journals have no room.
        frames: What copies to and from frames.
        tiers: In the order in which they are filled, with chunks of a page.
    """

    def __init__(self, sizes: PageSizes, frames: FrameCopies, tiers: Sequence[Tier]):
        super().__init__(sizes, (), None, tiers, [sizes.block_bytes // sizes.block_tokens] * sizes.layers)
        self._frames = frames
        self._between: SimpleQueue[Chunk] = SimpleQueue()  # one for each thread
        for _ in range(0 if all(isinstance(tier, HostTier) for tier in tiers) else THREADS):
            self._between.put(frames.memory(sizes.page_bytes))

    def read(self, move: PageMove) -> int:
        """Bring a page to its frame, as `PageStore.read`."""
        tier, place = self.place(move.page)
        with self._memory_for(tier, place) as memory:
            if not isinstance(tier, HostTier):
                for at, stop in move.runs:
                    tier.read(place, memory[at:stop], at)
            if not move.unseal(memory, self.sizes.block_bytes):
                raise OSError(0, "what was read is not what was written")
            self._frames.into(move.frame, move.runs, memory)
        return move.nbytes

    def write(self, move: PageMove) -> int:
        """Write what changed of a page, as `PageStore.write`."""
        tier, place = self.place(move.page)
        with self._memory_for(tier, place) as memory:
            self._frames.out(move.frame, move.runs, memory)
            move.seal(memory, self.sizes.block_bytes)
            if not isinstance(tier, HostTier):
                for at, stop in move.runs:
                    tier.write(place, memory[at:stop], at)
        return move.nbytes

    @contextmanager
    def _memory_for(self, tier: Tier, place: int) -> Iterator[Chunk]:
        """Have memory of a page: that of the tier, or what lies between."""
        if isinstance(tier, HostTier):
            yield tier.memory(place)
            return
        memory = self._between.get()
        try:
            yield memory
        finally:
            self._between.put(memory)
