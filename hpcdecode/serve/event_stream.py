"""Server-sent events to a client that may be slow, or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed the connection."""


def event(body: Any) -> bytes:
    """Return a body as an event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; once the client is gone cancel it and raise ClientGone. The body has been read."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancelled((working, gone))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come. It waits for a slow client, and gives it up after a time.

    Args:
        events: What is sent.
        left: Called at the end, also if the client is gone.
        stall_seconds: After which a client that takes nothing is given up.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], left: Callable[[], None], stall_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._left, self._stall_seconds = events, left, stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            await while_connected(receive, self._send(send))
        except ClientGone:
            return
        finally:
            self._left()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await self._sent(send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}))
        async for data in self._events:
            await self._sent(send({"type": "http.response.body", "body": data, "more_body": True}))
        await self._sent(send({"type": "http.response.body", "body": b"", "more_body": False}))

    async def _sent(self, sending: Awaitable[None]) -> None:
        """Await that something is sent; raise ClientGone if the client takes nothing for too long."""
        stalled, task = [False], asyncio.current_task()

        def give_up() -> None:
            stalled[0] = True
            if task is not None:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._stall_seconds, give_up)
        try:
            await sending
        except asyncio.CancelledError:
            if stalled[0]:
                raise ClientGone from None
            raise
        finally:
            timer.cancel()
