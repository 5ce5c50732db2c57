"""Waiting without using a core: poll while an answer is likely soon, then sleep for short times."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Generator
from typing import Protocol, TypeVar

T = TypeVar("T")

_SPIN_SECONDS, _OWN_CORES_SPIN_SECONDS = 200e-6, 5e-3
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3
_NAP_SHARE = 1 / 8  # longest nap as a share of the time waited so far
_PR_SET_TIMERSLACK = 29
_SLACK_NANOSECONDS = 1000

# By default Linux may end a sleep 50 us late.
ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)


class Waitable(Protocol):
    """An object that can be waited for: an MPI request, or anything with its `Test`."""

    def Test(self) -> bool:
        """Return whether it is complete."""
        ...


class Backoff:
    """Decides between polling and sleeping: call `pause` after a poll that found nothing, else `reset`.

    Attributes:
        own_cores: Whether no other rank runs on this rank's cores. It polls for longer then, because a core is slow
            for a while after it slept, and keeps its core: other programs might not give it back for milliseconds.
    """

    own_cores = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin to count the waiting time anew."""
        self._start = 0.0

    def pause(self) -> None:
        """Yield a core that others share; sleep if the waiting has lasted for long."""
        now = time.perf_counter()
        self._start = self._start or now
        waited = now - self._start
        if waited < (_OWN_CORES_SPIN_SECONDS if self.own_cores else _SPIN_SECONDS):
            if not self.own_cores:
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


def waited(requests: Generator[Waitable, None, T]) -> T:
    """Return what a generator returns, once all that it yields is complete."""
    try:
        while True:
            wait(next(requests))
    except StopIteration as end:
        result: T = end.value
        return result
