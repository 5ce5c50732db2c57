"""`/v1/files`: upload, list, get, read and delete files of requests, and the answers that batches make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse

from hpcdecode.serve.failures import errors
from hpcdecode.serve.files.store import FileStore
from hpcdecode.serve.files.upload import receive_file
from hpcdecode.serve.paging import DiskRoute, page_of

MOST_FILE_BYTES = 1 << 30
_MOST_LISTED = 10_000
_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "additionalProperties": False,
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
}


def files_router(
    store: FileStore,
    owner: Callable[[Request], str],
    in_use: Callable[[str], None],
    most_bytes: int = MOST_FILE_BYTES,
) -> APIRouter:
    """Return the routes.

    Args:
        store: The files.
        owner: Returns the client of a request.
        in_use: Raises ApiError if the file with an id must not be deleted now.
        most_bytes: Size that a file may have.
    """
    router = APIRouter(route_class=DiskRoute, tags=["files"], responses=errors(400, 401, 404, 409, 413, 503, 507))
    body = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}

    @router.post("/v1/files", openapi_extra=body)
    async def create_file(request: Request) -> dict[str, Any]:
        """Store a file of requests, one a line."""
        return (await receive_file(request, store, owner(request), most_bytes)).shown()

    @router.get("/v1/files")
    def list_files(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = _MOST_LISTED,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """List the client's files."""
        found = store.of(owner(request), purpose)
        return page_of(found if order == "desc" else found[::-1], after, limit)

    @router.get("/v1/files/{file_id}")
    def get_file(request: Request, file_id: str) -> dict[str, Any]:
        """Describe a file."""
        return store.get(file_id, owner(request)).shown()

    @router.get("/v1/files/{file_id}/content", response_class=FileResponse)
    def read_file(request: Request, file_id: str) -> FileResponse:
        """Return the content of a file."""
        record = store.get(file_id, owner(request))
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(
            store.path(record), headers=headers, media_type="application/octet-stream", filename=f"{record.id}.jsonl"
        )

    @router.delete("/v1/files/{file_id}")
    def delete_file(request: Request, file_id: str) -> dict[str, Any]:
        """Delete a file that no batch under way reads."""
        record = store.get(file_id, owner(request))
        in_use(record.id)
        store.delete(record.id, record.owner)
        return {"id": record.id, "object": "file", "deleted": True}

    return router
