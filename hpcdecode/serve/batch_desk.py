"""The live desk as batches see it: what it tells of a row goes to the batch that the row is of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from hpcdecode.engine.live import Event, LiveDesk, Update
from hpcdecode.requests.params import SamplingParams


class BatchDesk:
    """A `RowDesk` over a live desk. Any thread may use it.

    Args:
        desk: The live desk, whose events `deliver` must be given, too.
    """

    def __init__(self, desk: LiveDesk):
        self._desk = desk
        self._lock = threading.Lock()
        self._receivers: dict[int, Callable[[Event], None]] = {}  # by line
        self._submitting = 0  # threads that do not know the line of their row yet
        self._early: dict[int, Event] = {}  # ends of rows of unknown receivers, while there are such threads

    def submit(
        self,
        fields: dict[str, Any],
        defaults: SamplingParams,
        *,
        client: str,
        drawn_as: int,
        receive: Callable[[Event], None],
    ) -> int:
        """Queue a row; see `RowDesk`."""
        with self._lock:
            self._submitting += 1
        try:
            line = self._desk.submit(fields, defaults, client=client, drawn_as=drawn_as).line
            with self._lock:
                if (event := self._early.pop(line, None)) is None:
                    self._receivers[line] = receive
                else:
                    receive(event)
            return line
        finally:
            with self._lock:
                self._submitting -= 1
                if not self._submitting:
                    self._early.clear()

    def cancel(self, line: int) -> None:
        """Drop a row; its last event still comes."""
        self._desk.cancel(line)

    def deliver(self, events: Iterable[Event]) -> None:
        """Pass on those events that end rows of batches. It does not wait."""
        with self._lock:
            if not self._receivers and not self._submitting:
                return
            for event in events:
                if isinstance(event, Update):
                    continue
                line = event[0].line if isinstance(event, list) else event.line
                if receive := self._receivers.pop(line, None):
                    receive(event)
                elif self._submitting:
                    self._early[line] = event
