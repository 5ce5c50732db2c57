"""`/v1/batches`: create, list, get and cancel batches, with the objects of the OpenAI API."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from hpcdecode.serve.batch.queue import BatchQueue
from hpcdecode.serve.errors import ApiError
from hpcdecode.serve.failures import errors
from hpcdecode.serve.paging import DiskRoute, page_of

_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW = 365 * 86400
_Key = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]


class BatchRequest(BaseModel):
    """What a new batch is made of."""

    model_config = ConfigDict(extra="forbid")
    input_file_id: Annotated[str, StringConstraints(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Annotated[str, StringConstraints(max_length=16)] = "24h"
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None


def batches_router(queue: BatchQueue, owner: Callable[[Request], str]) -> APIRouter:
    """Return the routes.

    Args:
        queue: The batches.
        owner: Returns the client of a request.
    """
    router = APIRouter(
        route_class=DiskRoute, tags=["batches"], responses=errors(400, 401, 404, 409, 413, 429, 503, 507)
    )

    @router.post("/v1/batches")
    def create_batch(request: Request, asked: BatchRequest) -> dict[str, Any]:
        """Begin a batch: a job over the requests of a file."""
        window = asked.completion_window, window_seconds(asked.completion_window)
        return queue.create(owner(request), asked.input_file_id, asked.endpoint, window, asked.metadata).shown()

    @router.get("/v1/batches")
    def list_batches(
        request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> dict[str, Any]:
        """List the client's batches, the newest first."""
        return page_of(queue.of(owner(request)), after, limit)

    @router.get("/v1/batches/{batch_id}")
    def get_batch(request: Request, batch_id: str) -> dict[str, Any]:
        """Describe a batch."""
        return queue.get(batch_id, owner(request)).shown()

    @router.post("/v1/batches/{batch_id}/cancel")
    def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
        """Cancel a batch; the answers that there are go to its files."""
        return queue.cancel(batch_id, owner(request)).shown()

    return router


def window_seconds(text: str) -> int:
    """Return the seconds of a window such as `24h`, `90m` or `7d`.

    Raises:
        ApiError: It is none.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text, re.ASCII)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _MOST_WINDOW:
        expected = "minutes, hours or days up to 365d, such as 24h"
        raise ApiError(400, f"completion_window: expected {expected}, got {text!r}", "completion_window")
    return seconds
