"""The live desk as batches see it: what it tells of a row goes to the batch that the row is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcdecode.engine.live import Event, LiveDesk, Update
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.serve.receivers import Observe, Receivers, TimedRow


class _TimedBatchRow(TimedRow):
    """A row of a batch, and who is told of its end."""

    source = "batch"

    def __init__(self, prompt: Prompt, receive: Callable[[Event], None]) -> None:
        super().__init__(prompt)
        self.receive = receive


class BatchDesk:
    """A `RowDesk` over a live desk. Any thread may use it.

    Args:
        desk: The live desk, whose events `deliver` must be given.

    Attributes:
        observe: Called with each row that has ended, and how, for metrics.
        rows: Those in flight.
    """

    observe: Observe | None = None

    def __init__(self, desk: LiveDesk):
        self._desk = desk
        self.rows = Receivers[_TimedBatchRow]()

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

        def make(prompt: Prompt) -> _TimedBatchRow:
            return _TimedBatchRow(prompt, receive)

        return self.rows.submit(self._desk, fields, defaults, make, client=client, drawn_as=drawn_as).prompt.line

    def cancel(self, line: int) -> None:
        """Drop a row; its last event still comes."""
        self._desk.cancel(line)

    def deliver(self, events: Sequence[Event]) -> list[Event]:
        """Pass on the events of rows of batches, and return those of others. It does not wait."""
        others = []
        for event in events:
            row = None if isinstance(event, Update) else self.rows.of(event)
            if row is None:
                others.append(event)
                continue
            if self.observe is not None:
                self.observe(row, event)
            row.receive(event)
        return others
