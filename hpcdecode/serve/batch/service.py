"""Files and batches of a server, all together: a folder, the batches over the live desk, and their routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from hpcdecode.engine.live import Event, LiveDesk
from hpcdecode.serve.batch.desk import BatchDesk
from hpcdecode.serve.batch.queue import MOST_ROWS, BatchQueue
from hpcdecode.serve.batch.routes import batches_router
from hpcdecode.serve.files.folder import DataFolder
from hpcdecode.serve.files.owners import owner_of
from hpcdecode.serve.files.routes import MOST_FILE_BYTES, files_router


class BatchService:
    """Keeps files and runs batches, while an application with its `router` runs.

    Args:
        data: Where files and batches are kept.
        desk: The live desk, whose events `deliver` must be given.
        api_keys: Keys of the clients; requests are let in by others.
        about: Everything that tokens depend on but requests: the model's files, data types.
        attributes: Root attributes of results files; `model` has the `path` of the model.
        models: Names by which requests may ask for the model, beside those of its directory; answers have the first.
        most_file_bytes: Size that an uploaded file may have.
        most_rows: Rows of batches in flight at once.

    Attributes:
        desk: Where batches bring their rows.
        queue: The batches.
        router: The routes.
    """

    def __init__(
        self,
        data: DataFolder,
        desk: LiveDesk,
        *,
        api_keys: Collection[str] = (),
        about: dict[str, Any],
        attributes: dict[str, Any],
        models: Sequence[str] = (),
        most_file_bytes: int = MOST_FILE_BYTES,
        most_rows: int = MOST_ROWS,
    ):
        self._data, self.desk = data, BatchDesk(desk)
        files = self._data.files
        self.queue = BatchQueue(self._data.batches, files, self.desk, about, attributes, models, most_rows)

        def owner(request: Request) -> str:
            return owner_of(request, api_keys)

        self.router = APIRouter(lifespan=self._lifespan)
        self.router.include_router(files_router(files, owner, self.queue.require_unused, most_file_bytes))
        self.router.include_router(batches_router(self.queue, owner))

    def deliver(self, events: Sequence[Event]) -> list[Event]:
        """Take what the desk tells of rows of batches, in any thread, and return what it tells of others."""
        return self.desk.deliver(events)

    def close(self) -> None:
        """Stop the batches, which go on at the next start, and let other servers have the folder."""
        self.queue.stop()
        self._data.close()

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        self.queue.start()
        yield
        await to_thread.run_sync(self.close)
