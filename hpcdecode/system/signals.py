"""Reasons to stop a job before its rows are done: a signal, or the end of the batch job's time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from time import monotonic, time
from types import FrameType

DRAINED = 75  # exit code (EX_TEMPFAIL) of a job that has rows left and is to be started again
END_TIME = "SLURM_JOB_END_TIME"
_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Signals:
    """Context in which SIGTERM and SIGUSR1, and SIGINT after `hold_interrupts`, only make `stopping` true.

    A second SIGINT acts as it would outside the context. The others may repeat, since batch systems repeat them.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._deadline = float("inf")  # monotonic
        self._before: dict[int, _Handler] = {}
        self._begin: Callable[[], None] | None = None  # of a drain that is to come
        self._drain_seconds = 0.0

    def __enter__(self) -> Signals:
        self._take(signal.SIGTERM, signal.SIGUSR1)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold_interrupts(self) -> None:
        """Let the first SIGINT make `stopping` true from now on, because there is work to keep."""
        self._take(signal.SIGINT)

    def drain_before(self, seconds: float, environment: Mapping[str, str] = os.environ) -> str:
        """Make `stopping` true `seconds` before the end of the batch job's time, but not before half of it is used.

        Args:
            seconds: Seconds before the end; 0 never stops for it.
            environment: Variables, of which END_TIME is the end as a Unix time.

        Returns:
            A message for the user, or an empty string.
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

    def drain_first(self, begin: Callable[[], None], seconds: float) -> None:
        """Let a signal call `begin` where `stopping` is asked for, and make that true `seconds` later only."""
        self._begin, self._drain_seconds = begin, seconds

    @property
    def has_deadline(self) -> bool:
        """Whether `stopping` becomes true at a certain time."""
        return self._deadline < float("inf")

    @property
    def stopping(self) -> bool:
        """Whether the job is to stop."""
        if self._received is None:
            return monotonic() >= self._deadline
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._deadline = monotonic() + self._drain_seconds
            begin()
        return not self._drain_seconds or monotonic() >= self._deadline

    @property
    def cause(self) -> str:
        """Reason why `stopping` is true."""
        return "the end of its time" if self._received is None else signal.Signals(self._received).name

    @property
    def interruption(self) -> str:
        """What a SIGINT did that was not held: the first one before there was work to keep, or a second one."""
        again = self._received == signal.SIGINT
        return "interrupted again before it had stopped" if again else "interrupted before the first step"

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if not stopping, DRAINED for SIGUSR1 and the end of the time, else 128 + signal."""
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
