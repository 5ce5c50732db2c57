"""The threads that move what tiers hold."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from hpcdecode.system.tier import Tier

THREADS = 2

_Job = Callable[[], None]


class TierThreads:
    """Threads that do jobs in order, and end when nothing refers to this any more.

    Args:
        name: Of the threads.
        cpus: Of the threads; None for those of the caller.
        tiers: That are closed after them.

    Attributes:
        close: Ends them.
    """

    def __init__(self, name: str, cpus: Sequence[int] | None, tiers: Sequence[Tier]):
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(self._jobs, cpus), daemon=True, name=name) for _ in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _close, self._jobs, threads, tiers)

    def put(self, job: _Job) -> None:
        """Have a thread do a job."""
        self._jobs.put(job)

    def move(self, move: Callable[[], int], done: Callable[[int], None]) -> None:
        """Have a thread call `move`, and then `done` with what it returned, the bytes that it moved."""
        self._jobs.put(lambda: done(move()))

    def wait(self, changed: threading.Condition) -> None:
        """Wait until a move is done; `changed` is held, and `done` notifies it."""
        changed.wait()


def _work(jobs: SimpleQueue[_Job | None], cpus: Sequence[int] | None) -> None:
    """Do jobs until there are no more."""
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)  # of this thread
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to the owner of this


def _close(jobs: SimpleQueue[_Job | None], threads: Sequence[threading.Thread], tiers: Sequence[Tier]) -> None:
    """End the threads and close the tiers."""
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    for tier in tiers:
        tier.close()
