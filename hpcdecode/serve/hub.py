"""Between the engine's thread and the server's: rows go to the desk, and their events reach those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.result import Result
from hpcdecode.engine.live import Event, LiveDesk, Update
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.serve.receivers import Observe, Receivers, TimedRow

_READERS = 4  # threads that read and tokenize rows

Ended = list[Result] | RowError


class Ticket(TimedRow):
    """A row in flight, for the one who waits for it.

    Updates that are not taken are merged, so a slow reader holds no more than the row's tokens.

    Attributes:
        ended: How the row ended; None before.
    """

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.ended: Ended | None = None
        self.abandoned = False
        self._updates: dict[int, Update] = {}  # by sample
        self._changed = asyncio.Event()

    async def news(self) -> list[Update]:
        """Return what came since the last call, by sample; wait for something. No updates come after the end."""
        await self._changed.wait()
        self._changed.clear()
        found, self._updates = sorted(self._updates.items()), {}
        if self.ended is not None:
            self._changed.set()
        return [update for _, update in found]

    async def end(self) -> Ended:
        """Return how the row ended, once it has."""
        while self.ended is None:
            await self.news()
        return self.ended

    def put(self, event: Event) -> None:
        """Take an event, in the server's thread."""
        if self.abandoned:
            return
        if not isinstance(event, Update):
            self.ended = event
        elif (held := self._updates.get(event.sample)) is None:
            self._updates[event.sample] = event
        else:
            logprobs = _joined(held.logprobs, event.logprobs)
            self._updates[event.sample] = Update(event.line, event.sample, held.token_ids + event.token_ids, logprobs)
        self._changed.set()


class Hub:
    """Submits rows to a desk and hands out their events. `deliver` is what the desk is made with.

    All other methods are called in the server's event loop, which `bind` tells.

    Args:
        observe: Called with the ticket and each event of a row, for metrics.

    Attributes:
        observe: As given.
        tickets: Of rows that have not ended.
    """

    def __init__(self, observe: Observe | None = None) -> None:
        self.observe = observe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = ThreadPoolExecutor(_READERS, "row-reader")
        self.tickets = Receivers[Ticket]()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the event loop of the server."""
        self._loop = loop

    def deliver(self, events: list[Event]) -> None:
        """Pass events on to the event loop, from any thread. Without a loop there is nobody to tell."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._dispatch, events)

    async def submit(
        self,
        desk: LiveDesk,
        fields: dict[str, Any],
        defaults: SamplingParams,
        *,
        client: str = "",
        drawn_as: int = 1,
        score: bool = False,
        updates: bool = False,
    ) -> Ticket:
        """Submit a row, in a thread of its own, and return its ticket; see `LiveDesk.submit` for what is raised."""
        options: dict[str, Any] = {"client": client, "drawn_as": drawn_as, "score": score, "updates": updates}
        reading = self._readers.submit(partial(self.tickets.submit, desk, fields, defaults, Ticket, **options))
        try:
            return await asyncio.shield(asyncio.wrap_future(reading))
        except asyncio.CancelledError:
            reading.add_done_callback(partial(self._orphaned, desk))
            raise

    async def read(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, in a thread of the row readers."""
        return await asyncio.wrap_future(self._readers.submit(work))

    def leave(self, desk: LiveDesk, ticket: Ticket) -> None:
        """Cancel a row that nobody waits for any more, unless it has ended."""
        if ticket.ended is None and not ticket.abandoned:
            ticket.abandoned = True
            desk.cancel(ticket.prompt.line)

    def close(self) -> None:
        """End the threads."""
        self._loop = None
        self._readers.shutdown(wait=False)

    def _orphaned(self, desk: LiveDesk, reading: Future[Ticket]) -> None:
        """Cancel a row whose caller was gone before it was queued."""
        if not reading.cancelled() and reading.exception() is None and self._loop is not None:
            self._loop.call_soon_threadsafe(self.leave, desk, reading.result())

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if (ticket := self.tickets.of(event)) is not None:
                if self.observe is not None:
                    self.observe(ticket, event)
                ticket.put(event)


def _joined(a: Logprobs | None, b: Logprobs | None) -> Logprobs | None:
    if a is None or b is None:
        return a or b
    return Logprobs([*a.chosen, *b.chosen], [*a.top_ids, *b.top_ids], [*a.top, *b.top])
