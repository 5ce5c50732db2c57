"""What stands before all routes: the key, and the size of bodies."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpcdecode.serve.errors import ApiError, error_response

OPEN_PATHS = frozenset(("/", "/health"))  # without a key; they have no data
_FILES = "/v1/files"


class Guard:
    """Answers requests without the key, and those with too large a body, before any route sees them.

    Args:
        app: What answers the others.
        keys: The keys, of which a request needs one; none lets everyone in.
        most: Bytes of a body at most.
        most_file: Of a body that is sent to /v1/files.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], most: int, most_file: int) -> None:
        self._app, self._most, self._most_file = app, most, most_file
        self._digests = [_digest(key.encode()) for key in keys]

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
        stated = headers.get("content-length", "")
        most = self._most_file if scope["path"] == _FILES else self._most
        if stated.isdecimal() and int(stated[:20]) > most:
            await error_response(_too_large(most))(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, most), send)

    def _admits(self, path: str, headers: Headers) -> bool:
        """Return whether a request has a key, in a time that tells nothing of it."""
        if not self._digests or path in OPEN_PATHS:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
        same = sum(hmac.compare_digest(digest, own) for own in self._digests)
        return same > 0 and scheme.lower() == "bearer"


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
