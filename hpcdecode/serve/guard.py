"""What stands before all routes, the page too: the key, and the size of bodies."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpcdecode.serve.credentials import given_key, is_forged
from hpcdecode.serve.errors import ApiError, error_response

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
        if (refusal := self._refusal(scope["method"], headers)) is not None:
            await error_response(refusal)(scope, receive, send)
            return
        stated = headers.get("content-length", "")
        most = self._most_file if scope["path"] == _FILES else self._most
        if stated.isdecimal() and int(stated[:20]) > most:
            await error_response(_too_large(most))(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, most), send)

    def _refusal(self, method: str, headers: Headers) -> ApiError | None:
        """Return why a request is not let in, or None. The time that it takes tells nothing of the keys."""
        if not self._digests:
            return None
        digest = _digest(given_key(headers))
        if not sum(hmac.compare_digest(digest, own) for own in self._digests):
            expected = "expected the server's key as 'Authorization: Bearer KEY', or as the password of a browser"
            return ApiError(401, f"{expected}, got none or another one")
        if is_forged(method, headers):
            return ApiError(403, "expected a request of the server's own page, got one of another site's page")
        return None


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
