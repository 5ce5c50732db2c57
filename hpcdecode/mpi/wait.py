"""Waiting without burning a core: poll while an answer is likely soon, then sleep in short naps."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Protocol

_SPIN_SECONDS, _OWN_CORES_SPIN_SECONDS = 200e-6, 5e-3
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3
_NAP_SHARE = 1 / 8  # of the time waited so far: what a nap may add to it
_PR_SET_TIMERSLACK = 29
_SLACK_NANOSECONDS = 1000

# Linux lets a sleep end 50 us late unless a thread asks for better.
ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)


class Waitable(Protocol):
    """What can be waited for: an MPI request, or anything with its `Test`."""

    def Test(self) -> bool: ...


class Backoff:
    """Call `pause` after every poll that found nothing, `reset` after one that did.

    own_cores: whether no other rank runs on this one's. It polls for longer then: a core that slept is slow at first.
    """

    own_cores = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._start = 0.0

    def pause(self) -> None:
        now = time.perf_counter()
        self._start = self._start or now
        waited = now - self._start
        if waited < (_OWN_CORES_SPIN_SECONDS if self.own_cores else _SPIN_SECONDS):
            os.sched_yield()
        else:
            time.sleep(min(max(waited * _NAP_SHARE, _SHORTEST_NAP), _LONGEST_NAP))


def wait(request: Waitable) -> None:
    """Return when `request` is complete."""
    if request.Test():
        return
    backoff = Backoff()
    while not request.Test():
        backoff.pause()
