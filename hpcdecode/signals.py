"""SIGINT and SIGTERM: stop at the next step, keep what is finished."""

from __future__ import annotations

import signal
from time import monotonic

_GRACE_SECONDS = 10.0


class Signals:
    """As a context: the first signal sets `received`, a second one ends the process as it would have without us."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self.received, self._at = number, monotonic()
        self.__exit__()

    def check(self) -> None:
        """Raise once the S-rank has had time to end the job after a signal, and did not."""
        if self.received is not None and monotonic() - self._at > _GRACE_SECONDS:
            raise RuntimeError(f"no stop plan came within {_GRACE_SECONDS:.0f} s of signal {self.received}")

    @property
    def exit_code(self) -> int:
        return 0 if self.received is None else 128 + self.received
