"""How fast chunks go to a tier and come in, measured with the threads that move them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from time import perf_counter, process_time

import msgspec

from hpcdecode._attn_cpu import crc32c
from hpcdecode.errors import UserError
from hpcdecode.system.memory import total_bytes
from hpcdecode.system.swap_tiers import ALIGNMENT, TierSpec, memory_for, open_tiers
from hpcdecode.system.tier import Chunk, Tier
from hpcdecode.system.tier_threads import THREADS, TierThreads

MEASURED_BYTES = 64 << 20  # of a tier
_MOST_TIMES, _MOST_SECONDS = 4, 0.2  # that they are written, and read; what comes first
_SMALL_MOVES = 64  # that show what a move takes however little it moves


class TierSpeed(msgspec.Struct, frozen=True):
    """How fast a tier is with all threads that move at work.

    Attributes:
        read_rate: Bytes that come in a second, checksums included.
        write_rate: Bytes that go out a second, checksums included.
        busy_threads: Threads that compute meanwhile, in the mean; the others wait for a device.
        move_seconds: What a move takes however little it moves, with all threads at work.
    """

    read_rate: float
    write_rate: float
    busy_threads: float = 0.0
    move_seconds: float = 0.0

    @property
    def least(self) -> float:
        """Return the lower one of both rates."""
        return min(self.read_rate, self.write_rate)

    def seconds(self, nbytes: int, chunk_bytes: int, writes: bool) -> float:
        """Return the seconds of a move of a part of a chunk.

        Args:
            nbytes: That move.
            chunk_bytes: Of a whole chunk, which the rates are of.
            writes: Whether they go out.
        """
        whole = chunk_bytes / (self.write_rate if writes else self.read_rate)
        least = min(self.move_seconds, whole)
        return least + (whole - least) * nbytes / chunk_bytes


def speed_here(spec: TierSpec, chunk_bytes: int) -> TierSpeed:
    """Return how fast a tier is on this host, of which a part is opened for that.

    Raises:
        UserError: If it cannot be opened, written or read.
    """
    some = TierSpec(spec.kind, min(spec.size, max(MEASURED_BYTES, chunk_bytes)), spec.directory, spec.rate)
    (tier,) = open_tiers([some], chunk_bytes, total_bytes())
    try:
        return tier_speed(tier, chunk_bytes)
    finally:
        tier.close()


def tier_speed(tier: Tier, moved_bytes: int) -> TierSpeed:
    """Return how fast a tier is.

    Args:
        tier: Whose first chunks are written for that.
        moved_bytes: Bytes that move of a chunk.

    Raises:
        UserError: If it cannot be written or read.
    """
    most = max(min(tier.chunks, MEASURED_BYTES // moved_bytes), 1)
    memory = [memory_for(moved_bytes) for _ in range(THREADS)]
    for each in memory:
        each[:] = 1
    try:
        for chunk in range(min(THREADS, most)):  # each of the threads' first one
            tier.write(chunk, memory[0])
        written, write_rate, _ = _rate(tier.write, memory, most)
        _, read_rate, busy = _rate(tier.read, memory, max(written, min(THREADS, most)))
        return TierSpeed(read_rate, write_rate, busy, _move_seconds(tier, memory[0][:ALIGNMENT]))
    except OSError as error:
        raise UserError(f"--kv-swap: expected a tier that can be written and read, got: {error.strerror}") from error


def _rate(move: Callable[[int, Chunk], None], memory: list[Chunk], most: int) -> tuple[int, float, float]:
    """Return how many of `most` chunks were moved in order, bytes a second, and threads that were busy."""

    def run(thread: int) -> int:
        done = 0
        while done * THREADS < _MOST_TIMES * most and perf_counter() < until:
            move((done * THREADS + thread) % most, memory[thread])
            crc32c(memory[thread])
            done += 1
        return done

    begin, computed = perf_counter(), process_time()
    until = begin + _MOST_SECONDS
    with ThreadPoolExecutor(THREADS) as pool:
        counts = list(pool.map(run, range(THREADS)))
    seconds = perf_counter() - begin
    whole = min(min(counts) * THREADS, most)
    return whole, sum(counts) * len(memory[0]) / seconds, (process_time() - computed) / seconds


def _move_seconds(tier: Tier, some: Chunk) -> float:
    """Return the seconds of a read of a few bytes by the threads that move, with those of handing it to them."""
    threads, done = TierThreads("kv-speed", None, ()), SimpleQueue[OSError | None]()

    def move() -> int:
        try:
            tier.read(0, some)
        except OSError as error:
            done.put(error)
        return len(some)

    begin = perf_counter()
    for _ in range(_SMALL_MOVES):
        threads.move(move, lambda _: done.put(None))
    ends = [done.get() for _ in range(_SMALL_MOVES)]
    seconds = perf_counter() - begin
    threads.close()
    if problems := [end for end in ends if end is not None]:
        raise problems[0]
    return seconds / _SMALL_MOVES
