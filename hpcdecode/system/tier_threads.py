"""The threads that move what tiers hold."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import PriorityQueue, SimpleQueue

from hpcdecode.system.tier import Tier

THREADS = 2

_Job = Callable[[], None]


class NewestFirst:
    """A queue of jobs: awaited ones in order, then the others, the last one first, then None.

    What the last one moves may still be in the processor's cache.
    """

    def __init__(self) -> None:
        self._jobs: PriorityQueue[tuple[int, int, _Job | None]] = PriorityQueue()
        self._numbers = count(1)

    def put(self, job: _Job | None, awaited: bool = False) -> None:
        """Add a job, or None for a thread to end."""
        number = next(self._numbers)
        self._jobs.put((2, number, None) if job is None else (0, number, job) if awaited else (1, -number, job))

    def get(self) -> _Job | None:
        """Return the next job, once there is one."""
        return self._jobs.get()[2]


_Jobs = NewestFirst | SimpleQueue[_Job | None]


class TierThreads:
    """Threads that do jobs, and end when nothing refers to this any more.

    Args:
        name: Of the threads.
        cpus: Of the threads; None for those of the caller.
        tiers: That are closed after them.
        newest_first: Whether jobs are done as `NewestFirst` says; else in order.

    Attributes:
        close: Ends them.
    """

    def __init__(self, name: str, cpus: Sequence[int] | None, tiers: Sequence[Tier], newest_first: bool = False):
        self._jobs: _Jobs = NewestFirst() if newest_first else SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(self._jobs, cpus), daemon=True, name=name) for _ in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _close, self._jobs, threads, tiers)

    def put(self, job: _Job, awaited: bool = False) -> None:
        """Have a thread do a job; `awaited`: before all that are not, if these are done newest first."""
        if isinstance(self._jobs, NewestFirst):
            self._jobs.put(job, awaited)
        else:
            self._jobs.put(job)

    def move(self, move: Callable[[], int], done: Callable[[int], None]) -> None:
        """Have a thread call `move`, and then `done` with what it returned, the bytes that it moved."""
        self._jobs.put(lambda: done(move()))

    def wait(self, changed: threading.Condition) -> None:
        """Wait until a move is done; `changed` is held, and `done` notifies it."""
        changed.wait()


def _work(jobs: _Jobs, cpus: Sequence[int] | None) -> None:
    """Do jobs until there are no more."""
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)  # of this thread
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to the owner of this


def _close(jobs: _Jobs, threads: Sequence[threading.Thread], tiers: Sequence[Tier]) -> None:
    """End the threads and close the tiers."""
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    for tier in tiers:
        tier.close()
