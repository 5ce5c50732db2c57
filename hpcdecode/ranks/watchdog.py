"""Watchdog against silent hangs: ranks report their progress, and the job ends with the name of one that makes none.

All ranks report to the lead, and the lead reports to one of them, its deputy. Every rank runs a thread for this, which
sleeps nearly all the time.
"""

from __future__ import annotations

import resource
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from hpcdecode.mpi.wait import wait
from hpcdecode.ranks import launch
from hpcdecode.ranks.team import Team
from hpcdecode.system.timeline import OPERATIONS, Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

_LONGEST_INTERVAL = 2.0  # seconds between two reports
_GRACE_INTERVALS = 2  # after the first suspicion: ranks that wait for the stuck one may be suspected before it
_LAST_NAP = 0.01
_CPU_SHARE = 1e-3  # of the time; a process that hangs uses none, and polling alone uses more
_BOUNDED = frozenset(
    ("slice", "logits", "post", "prefill", "sum", "take", "sample", "draft", "append", "attend", "wait")
)
_NAMES = tuple(OPERATIONS)
_BYE = -1
_SILENT, _STUCK, _WAITING = range(3)  # kinds of trouble, the likeliest cause first


class Vitals:
    """Progress of this rank: its operation, and for how long nothing has moved.

    An operation of a step makes progress when it ends. Others (load, end, desk, ...) make progress while the process
    computes, reads or writes. An R-rank may wait for any time, because S-ranks decide what comes next.
    """

    def __init__(self, timeline: Timeline, *, has_s: bool):
        self._timeline = timeline
        self._patient = ("idle",) if has_s else ("idle", "wait")
        self._seen: tuple[str | int, ...] = ()
        self._cpu, self._moved = 0.0, time.monotonic()
        self._taken = self._moved

    def take(self) -> tuple[str, float]:
        """Return the operation and the seconds without progress."""
        operation, since = self._timeline.current
        now, use = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        cpu = use.ru_utime + use.ru_stime - time.thread_time()
        seen: tuple[str | int, ...] = (operation, since)
        if operation not in _BOUNDED:
            seen += (use.ru_majflt, use.ru_inblock, use.ru_oublock)
            computes = cpu - self._cpu > _CPU_SHARE * (now - self._taken)
        else:
            computes = False
        if computes or seen != self._seen or operation in self._patient:
            self._moved = now
        self._seen, self._cpu, self._taken = seen, cpu, now
        return operation, now - self._moved


class _Seen:
    """Last report of a watched rank.

    Attributes:
        operation: Its operation.
        still: Seconds without progress, by its own account.
        at: Time of the report, monotonic.
    """

    def __init__(self) -> None:
        self.operation, self.still, self.at = "load", 0.0, time.monotonic()

    def trouble(self, now: float, timeout: float) -> tuple[int, float] | None:
        """Return the kind of trouble and its seconds if they exceed `timeout`, else None."""
        if now - self.at > timeout:
            return _SILENT, now - self.at
        if self.still > timeout:
            return (_WAITING if self.operation == "wait" else _STUCK), self.still
        return None


class Watchdog:
    """Context that ends the job, with a message, if a rank makes no progress for `timeout` seconds.

    All ranks of the team enter it. The message names the rank, its host and its operation. A job that was suspended
    and resumed as a whole goes on.

    Args:
        team: The ranks.
        timeline: Timeline of this rank.
        timeout: Seconds; 0 never ends the job.
    """

    def __init__(self, team: Team, timeline: Timeline, timeout: float):
        self._team, self._vitals, self._timeout = team, Vitals(timeline, has_s=team.me.has_s), timeout
        self._interval = min(_LONGEST_INTERVAL, timeout / 10)
        self._ending, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._lead, self._lost = team.s_ranks[0], set[int]()
        self._sent: MPI.Request | None = None
        self._watched = {rank: _Seen() for rank in range(len(team.ranks)) if team.lead}
        self._choose_deputy()
        self._suspected_since: float | None = None

    def __enter__(self) -> Watchdog:
        if self._timeout:
            self._comm = _duplicate(self._team.comm)
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._failed = kind is not None
        self._ending.set()
        if self._timeout:
            self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ending.wait(self._interval):
            now = time.monotonic()
            if now - last > self._timeout / 2:
                self._forgive(now)
            last = now
            operation, still = self._vitals.take()
            self._talk(_NAMES.index(operation), still)
            if self._team.lead:
                self._note(self._lead, _NAMES.index(operation), still)
            self._judge(now)
        self._part()

    def _part(self) -> None:
        """Say goodbye, and go on to watch the ranks that have not said it."""
        if self._failed:
            return
        self._watched.pop(self._team.place, None)
        self._talk(_BYE, 0.0, urgent=True)
        while self._watched:
            self._talk()
            self._judge(time.monotonic())
            time.sleep(_LAST_NAP)

    def _talk(self, code: int | None = None, still: float = 0.0, *, urgent: bool = False) -> None:
        """Receive the reports that have come, and send one if `code` is given."""
        if self._comm is None:
            return
        from mpi4py import MPI

        from hpcdecode.mpi import ulfm

        with suppress(MPI.Exception):  # a message from or to a rank that is lost
            lost = set(ulfm.lost(self._comm))
            if lost != self._lost:
                self._lost = lost
                self._choose_deputy()
            if code is not None:
                self._send(code, still, urgent)
            self._receive()

    def _choose_deputy(self) -> None:
        """Let the first of the other ranks watch the lead, and stop to watch ranks that are lost."""
        for rank in self._lost:
            self._watched.pop(rank, None)
        others = (rank for rank in range(len(self._team.ranks)) if rank != self._lead and rank not in self._lost)
        deputy = next(others, None)
        self._target, self._sent = deputy if self._team.lead else self._lead, None
        if self._team.place == deputy and not self._ending.is_set():
            self._watched.setdefault(self._lead, _Seen())

    def _send(self, code: int, still: float, urgent: bool) -> None:
        """Send a report unless the receiver has not taken the last one; wait for that if `urgent`."""
        if self._comm is None or self._target is None:
            return
        if self._sent is not None and urgent:
            wait(self._sent)
        if self._sent is None or self._sent.Test():
            self._wire = np.array([code, still])
            self._sent = self._comm.Isend(self._wire, self._target)
            if urgent:
                wait(self._sent)

    def _receive(self) -> None:
        from mpi4py import MPI

        if self._comm is None:
            return
        status, wire = MPI.Status(), np.empty(2)
        while self._comm.Iprobe(status=status):
            self._comm.Recv(wire, status.source)
            self._note(status.source, int(wire[0]), float(wire[1]))

    def _note(self, rank: int, code: int, still: float) -> None:
        if code == _BYE:
            self._watched.pop(rank, None)
            return
        seen = self._watched.setdefault(rank, _Seen())
        seen.operation, seen.at = _NAMES[code], time.monotonic()
        seen.still = still if self._team.lead else 0.0  # the lead itself judges whether it is stuck

    def _forgive(self, now: float) -> None:
        """Begin anew after this process was suspended, as probably all of them were."""
        self._suspected_since = None
        for seen in self._watched.values():
            seen.at = now

    def _judge(self, now: float) -> None:
        """End the job if a rank has exceeded the timeout, after a grace time in which its cause may show."""
        troubles = {rank: t for rank, seen in self._watched.items() if (t := seen.trouble(now, self._timeout))}
        if not troubles:
            self._suspected_since = None
            return
        self._suspected_since = self._suspected_since or now
        if now - self._suspected_since >= _GRACE_INTERVALS * self._interval:
            rank = min(troubles, key=lambda rank: (troubles[rank][0], -troubles[rank][1]))
            self._end(rank, *troubles[rank])

    def _end(self, rank: int, kind: int, seconds: float) -> NoReturn:
        where, operation = self._team.ranks[rank].host, self._watched[rank].operation
        sign = "no sign of life" if kind == _SILENT else "no progress"
        launch.last_words(
            f"hpcdecode: rank {rank} on {where} stalled: {sign} for {seconds:.0f} s, in {operation} "
            f"({OPERATIONS[operation]}); the same command goes on (--stall-timeout {self._timeout:g})"
        )
        launch.end_all(self._comm)


def _duplicate(comm: MPI.Intracomm | None) -> MPI.Intracomm | None:
    if comm is None:
        return None
    made, request = comm.Idup()
    wait(request)
    return made
