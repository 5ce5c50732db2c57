"""A tier that moves no more than so many bytes a second."""

from __future__ import annotations

import threading
import time

from hpcdecode.system.tier import Chunk, Tier


class ThrottledTier:
    """A tier that moves at most so many bytes a second, whatever the number of threads.

    Args:
        tier: That moves them.
        rate: Bytes a second.
    """

    def __init__(self, tier: Tier, rate: int):
        self.chunks, self.reserve, self.close = tier.chunks, tier.reserve, tier.close
        self._tier, self._rate = tier, rate
        self._lock, self._free_at = threading.Lock(), 0.0

    def write(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Write, as `Tier.write`."""
        end = self._end_of(len(data))
        self._tier.write(chunk, data, at)
        time.sleep(max(end - time.perf_counter(), 0.0))

    def read(self, chunk: int, data: Chunk, at: int = 0) -> None:
        """Read, as `Tier.read`."""
        end = self._end_of(len(data))
        self._tier.read(chunk, data, at)
        time.sleep(max(end - time.perf_counter(), 0.0))

    def _end_of(self, nbytes: int) -> float:
        """Return when a move of so many bytes ends, behind those before it."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._rate
            return self._free_at
