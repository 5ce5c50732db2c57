"""Who is told what happens to rows: known from before a row is queued until it has ended."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import Any, Generic, TypeVar

from hpcdecode.engine.live import Event, LiveDesk, Update
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt


class TimedRow:
    """When a row came, and its tokens.

    Attributes:
        source: What brought it, as metrics name it.
        prompt: The row.
        submitted_at: Unix time.
        first_token_at: Unix time at which the first update came; 0 before.
        last_token_at: Unix time at which the last update came; 0 before.
    """

    source = "request"

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.submitted_at = prompt, time()
        self.first_token_at = self.last_token_at = 0.0


Observe = Callable[[TimedRow, Event], None]  # is told what happens to rows
Receiver = TypeVar("Receiver", bound=TimedRow)


class Receivers(Generic[Receiver]):
    """The receivers of rows in flight, by line. Any thread may use it."""

    def __init__(self) -> None:
        self._by_line: dict[int, Receiver] = {}

    def __len__(self) -> int:
        return len(self._by_line)

    def submit(
        self,
        desk: LiveDesk,
        fields: dict[str, Any],
        defaults: SamplingParams,
        make: Callable[[Prompt], Receiver],
        **options: Any,
    ) -> Receiver:
        """Queue a row, and return its receiver, which `make` returns; see `LiveDesk.submit` for what is raised."""
        made: list[Receiver] = []

        def register(prompt: Prompt) -> None:
            made.append(make(prompt))
            self._by_line[prompt.line] = made[0]

        try:
            desk.submit(fields, defaults, named=register, **options)
        except BaseException:
            for receiver in made:
                self._by_line.pop(receiver.prompt.line, None)
            raise
        return made[0]

    def of(self, event: Event) -> Receiver | None:
        """Return the receiver of an event, which is forgotten with the row's last one; None if it is not here."""
        line = event[0].line if isinstance(event, list) else event.line
        return self._by_line.get(line) if isinstance(event, Update) else self._by_line.pop(line, None)
