"""What asks a job to stop before its rows are done: a signal, or the end of the time that the batch system gives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from time import monotonic, time

DRAINED = 75  # exit code (EX_TEMPFAIL) of a job that has rows left and is to be started again
END_TIME = "SLURM_JOB_END_TIME"


class Signals:
    """As a context: SIGTERM and SIGUSR1, and SIGINT after `hold_interrupts`, make `stopping` true and do nothing else.

    A second SIGINT ends the process as the first would have without us; batch systems repeat the others.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._deadline = float("inf")  # monotonic
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        self._take(signal.SIGTERM, signal.SIGUSR1)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold_interrupts(self) -> None:
        """There is something to keep from now on."""
        self._take(signal.SIGINT)

    def drain_before(self, seconds: float, environment: Mapping[str, str] = os.environ) -> str:
        """Stop so many seconds before the batch job's time is over, but work for half of what is left of it.

        0 does not stop for that. Returns what there is to say about it, or nothing.
        """
        text = environment.get(END_TIME)
        if not seconds or not text:
            return ""
        left = int(text) - time() if text.isdecimal() else 0
        if left <= 0:
            return (
                f"{END_TIME}: expected a Unix time to come, got {text!r}; the job does not stop before its time is over"
            )
        margin = min(seconds, left / 2)
        self._deadline = monotonic() + left - margin
        early = "" if margin == seconds else f", not {seconds:g} s (--drain-before)"
        return f"time left: {left:.0f} s; the job stops {margin:.0f} s before its end{early}"

    @property
    def stopping(self) -> bool:
        return self._received is not None or monotonic() >= self._deadline

    @property
    def cause(self) -> str:
        """What made `stopping` true."""
        return "the end of its time" if self._received is None else signal.Signals(self._received).name

    @property
    def exit_code(self) -> int:
        """0 if nothing came, DRAINED for SIGUSR1 and the end of time, else 128 + signal."""
        if not self.stopping:
            return 0
        return DRAINED if self._received in (None, signal.SIGUSR1) else 128 + self._received

    def _take(self, *numbers: int) -> None:
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        self._received = self._received or number
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
