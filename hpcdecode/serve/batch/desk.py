"""The live desk as batches see it: what it tells of a row goes to the batch that the row is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcdecode.engine.live import Event, LiveDesk, Update
from hpcdecode.requests.params import SamplingParams


class BatchDesk:
    """A `RowDesk` over a live desk. Any thread may use it.

    Args:
        desk: The live desk, whose events `deliver` must be given.
    """

    def __init__(self, desk: LiveDesk):
        self._desk = desk
        self._receivers: dict[int, Callable[[Event], None]] = {}  # by line

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
        line: int | None = None

        def named(own: int) -> None:
            nonlocal line
            line = own
            self._receivers[own] = receive

        try:
            return self._desk.submit(fields, defaults, client=client, drawn_as=drawn_as, named=named).line
        except BaseException:
            if line is not None:
                self._receivers.pop(line, None)
            raise

    def cancel(self, line: int) -> None:
        """Drop a row; its last event still comes."""
        self._desk.cancel(line)

    def deliver(self, events: Sequence[Event]) -> list[Event]:
        """Pass on the events of rows of batches, and return those of others. It does not wait."""
        others = []
        for event in events:
            line = event[0].line if isinstance(event, list) else event.line
            receive = None if isinstance(event, Update) else self._receivers.pop(line, None)
            if receive is None:
                others.append(event)
            else:
                receive(event)
        return others
