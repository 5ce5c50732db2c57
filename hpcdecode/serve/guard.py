"""What stands before all routes: the key, and the size of bodies."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpcdecode.serve.context import RequestBounds
from hpcdecode.serve.errors import ApiError, error_response

OPEN_PATHS = frozenset(("/health",))  # without a key
_FILES = "/v1/files"


class Guard:
    """Answers requests without the key, and those with too large a body, before any route sees them.

    Args:
        app: What answers the others.
        api_key: The key; None for none.
        bounds: The sizes of bodies.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, bounds: RequestBounds) -> None:
        self._app, self._bounds = app, bounds
        self._digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no websockets
        headers = Headers(scope=scope)
        if not self._admits(scope["path"], headers):
            error = ApiError(401, "expected the server's key as 'Authorization: Bearer KEY', got none or another one")
            await error_response(error)(scope, receive, send)
            return
        most = self._bounds.file_bytes if scope["path"].startswith(_FILES) else self._bounds.body_bytes
        stated = headers.get("content-length", "")
        if stated.isdecimal() and int(stated[:20]) > most:
            await error_response(_too_large(most))(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, most), send)

    def _admits(self, path: str, headers: Headers) -> bool:
        """Return whether a request has the key, in a time that tells nothing of it."""
        if self._digest is None or path in OPEN_PATHS:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(_digest(given.strip().encode("latin-1")), self._digest)
        return same and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"expected a body of at most {most} bytes, got a larger one")


def _bounded(receive: Receive, most: int) -> Receive:
    """Return `receive` that raises ApiError once more than `most` bytes of the body have come."""
    size = 0

    async def receive_some() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise _too_large(most)
        return message

    return receive_some
