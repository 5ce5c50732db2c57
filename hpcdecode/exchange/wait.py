"""Waiting without burning a core: poll while an answer is likely soon, then sleep in short naps."""

from __future__ import annotations

import os
import time
from typing import Protocol

_SPIN_SECONDS = 100e-6
_FIRST_NAP, _LONGEST_NAP = 20e-6, 1e-3


class Request(Protocol):
    """What can be waited for: an MPI request, or anything with its `Test`."""

    def Test(self) -> bool: ...


class Backoff:
    """Call `pause` after every poll that found nothing, `reset` after one that did."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._start = 0.0
        self._nap = _FIRST_NAP

    def pause(self) -> None:
        now = time.perf_counter()
        self._start = self._start or now
        if now - self._start < _SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(self._nap)
            self._nap = min(self._nap * 1.5, _LONGEST_NAP)


def wait(request: Request) -> None:
    """Return when `request` is complete."""
    backoff = Backoff()
    while not request.Test():
        backoff.pause()
