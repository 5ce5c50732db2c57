"""What the routes of files and batches share: lists a page at a time, and what is said of a full disk."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from hpcdecode.requests.values import printable
from hpcdecode.serve.errors import ApiError


class Listed(Protocol):
    """Something that lists show."""

    id: str

    def shown(self) -> dict[str, Any]:
        """Return it as the OpenAI API shows it."""


_Object = TypeVar("_Object", bound=Listed)


def page_of(objects: Sequence[_Object], after: str | None, limit: int) -> dict[str, Any]:
    """Return the list object of the OpenAI API with up to `limit` objects behind the one with the id `after`.

    Raises:
        ApiError: There is no such object.
    """
    start = 0
    if after is not None:
        start = next((i + 1 for i, found in enumerate(objects) if found.id == after), 0)
        if not start:
            raise ApiError(
                404, f"after: expected an id of the list, got {printable(after)[:80]!r}", "after", "not_found"
            )
    shown = [found.shown() for found in objects[start : start + limit]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(objects),
    }


class DiskRoute(APIRoute):
    """A route that says when the disk is full."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return what answers a request."""
        answer = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await answer(request)
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                message = "expected room on the server's disk, got none; delete files"
                raise ApiError(507, message, code="disk_full") from e

        return handled
