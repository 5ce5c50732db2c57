"""Blocks of sequences that leave the KV cache of an R-rank for a tier, and come back.

What leaves is copied to staging buffers at once, so that its blocks can be given to others; threads write the buffers
to the tier, read what is to come back, and copy it into the KV cache while lanes go on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import LifoQueue, SimpleQueue
from time import perf_counter

from hpcdecode._attn_cpu import crc32c
from hpcdecode.attention.base import KvCache
from hpcdecode.attention.swapped_blocks import blocks_of
from hpcdecode.errors import InvariantViolation
from hpcdecode.system.swap_tiers import aligned
from hpcdecode.system.tier import Chunk, Tier
from hpcdecode.system.tier_threads import THREADS, TierThreads

_LEAST_CHUNK = 1 << 20  # bytes
_STAGED_BYTES, _LEAST_STAGED = 64 << 20, 4  # of all staging buffers, and how many there are at least

Key = tuple[int, int]  # lane and ticket
_Place = tuple[int, int]  # tier and chunk
logger = logging.getLogger(__name__)


def chunk_blocks(block_bytes: int) -> int:
    """Return the KV blocks of a chunk, which has 1 MiB at least."""
    return -(-_LEAST_CHUNK // block_bytes)


def chunk_bytes(block_bytes: int) -> int:
    """Return the bytes of a chunk of tiers."""
    return aligned(chunk_blocks(block_bytes) * block_bytes)


@dataclass(slots=True, eq=False)
class _Copy:
    """What a tier has of a sequence.

    Attributes:
        tokens: That it has.
        sizes: Bytes of its chunks.
        places: Where they are.
        sums: Checksums.
        under_way: Chunks that are written, or read.
        failed: It cannot be brought back.
        slot: To which it comes back, or -1.
    """

    key: Key
    tokens: int
    sizes: list[int]
    places: list[_Place]
    sums: list[int] = field(default_factory=list)
    under_way: int = 0
    failed: bool = False
    slot: int = -1


@dataclass(slots=True)
class SwapCounts:
    """What was moved, and the seconds of the threads that moved it."""

    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0
    failures: int = 0


class KvSwap:
    """The tiers of an R-rank. Its methods are called by one thread.

    Args:
        kv_cache: whose blocks move.
        tiers: in the order in which they are filled.
        cpus: of the threads that move; None for those of the caller.

    Attributes:
        counts: of what was moved.
    """

    def __init__(self, kv_cache: KvCache, tiers: Sequence[Tier], cpus: Sequence[int] | None = None):
        self.counts = SwapCounts()
        cache = blocks_of(kv_cache)
        if cache is None:
            raise InvariantViolation("tiers are for KV caches whose blocks can be read", type(kv_cache).__name__)
        self._cache, self._tiers = cache, list(tiers)
        self._blocks = chunk_blocks(cache.block_bytes)
        self._free: list[list[int]] = [list(range(tier.chunks))[::-1] for tier in tiers]
        self._copies: dict[Key, _Copy] = {}
        self._results: dict[int, deque[tuple[int, bool]]] = {}
        self._lock = threading.Condition()
        size = chunk_bytes(cache.block_bytes)
        self._staged: LifoQueue[Chunk] = LifoQueue()  # the one that was used last may be in the processor's cache
        for _ in range(max(_STAGED_BYTES // size, _LEAST_STAGED)):
            self._staged.put(cache.memory(size))
        self._buffers: SimpleQueue[Chunk] = SimpleQueue()  # one for each thread to read to
        for _ in range(THREADS):
            self._buffers.put(cache.memory(size))
        self._threads = TierThreads("kv-swap", cpus, self._tiers, newest_first=True)
        self.close = self._threads.close

    def out(self, lane: int, slot: int, ticket: int) -> None:
        """Copy what a slot holds; its blocks may then go to others. What cannot be kept is found when it is wanted."""
        key = lane, ticket
        if key in self._copies:
            raise InvariantViolation("a sequence leaves once under a ticket", f"lane {lane}, ticket {ticket}")
        copy = self._copies[key] = self._place(key, slot)
        copy.under_way = len(copy.places)
        for i, nbytes in enumerate(copy.sizes if copy.places else ()):
            staged = self._staged.get()
            copied = self._cache.copy_out(slot, i * self._blocks, staged[:nbytes])
            self._threads.put(partial(self._write, copy, i, staged, copied))

    def bring(self, lane: int, slot: int, ticket: int) -> None:
        """Begin to bring back what left under a ticket, to a slot of its length; `take_results` says when it is there.

        The slot must not be released before.
        """
        copy = self._copies.get((lane, ticket))
        tokens = self._cache.length(slot)
        if copy is None or copy.tokens != tokens:
            left = "nothing" if copy is None else f"{copy.tokens} tokens"
            raise InvariantViolation(
                "what comes back is what has left", f"lane {lane}, ticket {ticket}: {left} left, {tokens} are to come"
            )
        with self._lock:
            copy.slot = slot
            if not copy.under_way:
                self._begin_reading(copy)

    def take_results(self, lane: int) -> list[tuple[int, bool]]:
        """Return the tickets of a lane that came to an end since the last call, and whether all is back."""
        results, taken = self._results.get(lane), []
        with suppress(IndexError):
            while results:
                taken.append(results.popleft())
        return taken

    def wait(self) -> None:
        """Wait until nothing is under way."""
        with self._lock:
            self._lock.wait_for(lambda: not any(copy.under_way for copy in self._copies.values()))

    def forget(self, lane: int) -> None:
        """Drop all that a lane has here, once nothing of it is under way; what was to come back fails."""
        copies = [copy for key, copy in self._copies.items() if key[0] == lane]
        for copy in copies:
            copy.failed = True
        with self._lock:
            self._lock.wait_for(lambda: not any(copy.under_way for copy in copies))
            for copy in copies:
                if copy.key in self._copies:
                    self._end(copy, back=False)

    def check(self) -> None:
        """Raise InvariantViolation unless every chunk of every tier is free or held by one copy."""
        with self._lock:
            held = [place for copy in self._copies.values() for place in copy.places]
            for tier, free in enumerate(self._free):
                chunks = sorted([*free, *(chunk for of, chunk in held if of == tier)])
                if chunks != list(range(self._tiers[tier].chunks)):
                    raise InvariantViolation(
                        "chunks of a tier are free or held once",
                        f"tier {tier}: {len(free)} free, {len(chunks) - len(free)} held of {self._tiers[tier].chunks}",
                    )

    def _place(self, key: Key, slot: int) -> _Copy:
        """Return a copy of a slot with room, one that failed if there is none."""
        cache = self._cache
        tokens, blocks = cache.length(slot), cache.held_blocks(slot)
        sizes = [min(self._blocks, blocks - at) * cache.block_bytes for at in range(0, blocks, self._blocks)]
        with self._lock:
            if sum(map(len, self._free)) < len(sizes):
                self._fail_once("no room in its tiers")
                return _Copy(key, tokens, sizes, [], failed=True)
            places: list[_Place] = []
            for tier, free in enumerate(self._free):
                places += [(tier, free.pop()) for _ in range(min(len(sizes) - len(places), len(free)))]
        return _Copy(key, tokens, sizes, places, [0] * len(sizes))

    def _write(self, copy: _Copy, index: int, staged: Chunk, copied: Callable[[], int]) -> None:
        copy.sums[index] = copied()  # before the buffer is another's, too

        def move() -> None:
            nbytes, (tier, chunk) = copy.sizes[index], copy.places[index]
            self._tiers[tier].write(chunk, staged[: aligned(nbytes)])
            with self._lock:
                self.counts.bytes_out += nbytes

        self._move(copy, move)
        self._staged.put(staged)
        with self._lock:
            copy.under_way -= 1
            if not copy.under_way and copy.slot >= 0:
                self._begin_reading(copy)
            self._lock.notify_all()

    def _begin_reading(self, copy: _Copy) -> None:
        """Have the threads bring a copy back; the lock is held."""
        if copy.failed:
            self._end(copy, back=False)
            return
        copy.under_way = len(copy.places)
        for i in range(len(copy.places)):
            self._threads.put(partial(self._read, copy, i), awaited=True)

    def _read(self, copy: _Copy, index: int) -> None:
        buffer = self._buffers.get()

        def move() -> None:
            nbytes, (tier, chunk) = copy.sizes[index], copy.places[index]
            self._tiers[tier].read(chunk, buffer[: aligned(nbytes)])
            if crc32c(buffer[:nbytes]) != copy.sums[index]:
                raise OSError(0, "what was read is not what was written")
            self._cache.copy_in(copy.slot, index * self._blocks, buffer[:nbytes])
            with self._lock:
                self.counts.bytes_in += nbytes

        self._move(copy, move)
        self._buffers.put(buffer)
        with self._lock:
            copy.under_way -= 1
            if not copy.under_way:
                self._end(copy, back=not copy.failed)
            self._lock.notify_all()

    def _move(self, copy: _Copy, move: Callable[[], None]) -> None:
        """Move a chunk unless others of its copy failed; note if it fails."""
        if copy.failed:
            return
        begin = perf_counter()
        try:
            move()
        except OSError as error:
            with self._lock:
                if not copy.failed:
                    copy.failed = True
                    self._fail_once(error.strerror or str(error))
        with self._lock:
            self.counts.seconds += perf_counter() - begin

    def _end(self, copy: _Copy, back: bool) -> None:
        """Forget a copy and give its chunks back; say so if it was wanted. The lock is held."""
        del self._copies[copy.key]
        for tier, chunk in copy.places:
            self._free[tier].append(chunk)
        if copy.slot >= 0:
            lane, ticket = copy.key
            self._results.setdefault(lane, deque()).append((ticket, back))

    def _fail_once(self, why: str) -> None:
        if not self.counts.failures:
            logger.warning(f"--kv-swap: {why}; rows that cannot be kept are prefilled again")
        self.counts.failures += 1
