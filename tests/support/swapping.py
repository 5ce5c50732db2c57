"""Tiers for tests: they keep sequences whatever it costs, bring them back some steps later, and lose some of them."""

from __future__ import annotations

import errno
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.swapped_blocks import blocks_of
from hpcdecode.engine import kv_swap, swap_room
from hpcdecode.engine.kv_swap import KvSwap
from hpcdecode.engine.tier_speed import TierSpeed
from hpcdecode.schedule.swaps import Swaps
from hpcdecode.schedule.tier_traffic import TierTraffic
from hpcdecode.system import swap_tiers
from hpcdecode.system.swap_tiers import HostTier

TIERS = {"host": "host:64M", "file": "nvme:{folder}:64M", "torn": "host:64M"}  # values of --kv-swap


def eager(swaps: Swaps) -> Swaps:
    """Have sequences move to tiers whatever it costs."""
    swaps.rates, swaps.prefill_seconds = (math.inf,) * len(swaps.rates), 1.0
    return swaps


def chunk_bytes(kv_cache) -> int:
    return kv_swap.chunk_bytes(blocks_of(kv_cache).block_bytes)


def host_swap(kv_cache, chunks: int) -> KvSwap:
    """Return tiers of so many chunks of memory for a KV cache."""
    size = chunk_bytes(kv_cache)
    return KvSwap(kv_cache, [HostTier(size * chunks, size)])


class DelayedTiers:
    """The tiers of the R-ranks of a `Machine`. What comes back is told of after a number of steps that is drawn.

    Args:
        chunks: Of each R-rank.
        loses: Share of what comes back that is said to be lost.
        most: Steps that it takes at most.
    """

    def __init__(self, chunks: int, loses: float = 0.0, most: int = 4):
        self.chunks, self.loses, self.most = chunks, loses, most
        self._draw = np.random.default_rng(1)
        self._due = defaultdict(list)  # by lane: step, ticket, whether it is back
        self.told = 0

    def swaps(self, ranks: int, footprint: Footprint) -> Swaps:
        return eager(Swaps([self.chunks] * ranks, 1 << 20, [1.0] * ranks, footprint))

    def open(self, store) -> KvSwap:
        return host_swap(store, self.chunks)

    def apply(self, lane: int, part, plan, rank: int, now: int) -> None:
        """Wait for what a plan brings back, so that every run of a test is alike."""
        wanted = {ticket for of, _, ticket, _ in plan.swap_in.tolist() if of == rank}
        while wanted:
            for ticket, back in part.take_swapped(lane):
                wanted.remove(ticket)
                back = back and self._draw.random() >= self.loses
                self._due[lane].append((now + 1 + int(self._draw.integers(self.most)), ticket, back))
            time.sleep(1e-5)

    def due(self, lane: int, now: int) -> list[tuple[int, bool]]:
        """Return what is told of at a step."""
        due = [(ticket, back) for step, ticket, back in self._due[lane] if step <= now]
        self._due[lane] = [one for one in self._due[lane] if one[0] > now]
        self.told += len(due)
        return due


class TornTier(HostTier):
    """Memory that spoils, then refuses, some of what it is given."""

    def __init__(self, size, chunk_bytes, allocate=None):
        super().__init__(size, chunk_bytes, allocate)
        self.writes = 0

    def write(self, chunk, data):
        self.writes += 1
        if self.writes % 3 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(chunk, data)
        if self.writes % 3 == 1:
            self._held[chunk][17] ^= 4


class Moves(TierTraffic):
    """Counts what engines of this process moved to tiers, and what was lost there.

    Attributes:
        count: of sequences; lost: of those that did not come back.
    """

    count = lost = 0

    def move_out(self, sequence):
        ticket = super().move_out(sequence)
        Moves.count += ticket is not None
        return ticket

    def settle(self):
        back, lost = super().settle()
        Moves.lost += len(lost)
        return back, lost


@contextmanager
def free_moves(torn: bool = False) -> Iterator[None]:
    """Let engines take tiers for infinitely fast, so that all that can moves there; `torn` ones lose much."""
    kind = TornTier if torn else HostTier
    moves = patch("hpcdecode.schedule.scheduler.TierTraffic", Moves)
    fast = patch.object(swap_room, "tier_speed", lambda *_: TierSpeed(math.inf, math.inf))
    with fast, patch.object(swap_tiers, "HostTier", kind), moves:
        yield
