"""All batches of a server: some run at once, the others wait; those under way go on when the server starts again."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpcdecode.requests.values import printable
from hpcdecode.serve.batch.flow import RowDesk
from hpcdecode.serve.batch.record import BatchRecord, load, save
from hpcdecode.serve.batch.run import BatchMeans, BatchRun
from hpcdecode.serve.errors import ApiError
from hpcdecode.serve.files.store import BATCH, FileStore

MOST_ROWS = 256  # in flight, of all batches together
MOST_RUNNING = 8  # batches at once
MOST_WAITING = 1000  # batches that are not done, of all clients
MOST_REQUESTS = 1_000_000  # of a batch
_STOP_SECONDS = 10.0


class BatchQueue:
    """The batches of all clients. Any thread may use it.

    Args:
        folder: Where their states and results are; only one process may use it.
        files: Files of the clients.
        desk: Where rows go.
        about: Everything that tokens depend on but requests, such as the model's files and data types.
        attributes: Attributes of the results files.
        models: Names by which requests may ask for the model, beside those of its directory.
        most_rows: Rows in flight, of all batches together, so that others' requests do not wait for long.
    """

    def __init__(
        self,
        folder: Path,
        files: FileStore,
        desk: RowDesk,
        about: dict[str, Any],
        attributes: dict[str, Any],
        models: Sequence[str] = (),
        most_rows: int = MOST_ROWS,
    ):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files, self._most_rows = files, most_rows
        self._means = BatchMeans(folder, files, desk, about, attributes, models, self._share, MOST_REQUESTS)
        self._lock = threading.RLock()
        self._records = {record.id: record for record in load(folder)}
        self._serial = max((record.serial for record in self._records.values()), default=0)
        self._runs: dict[str, BatchRun] = {}
        self._stopped = True

    def start(self) -> None:
        """Go on with the batches that are not done."""
        self._stopped = False
        self._start_next()

    def stop(self) -> None:
        """End all runs; they go on when the server is started again."""
        with self._lock:
            self._stopped = True
            runs = list(self._runs.values())
        for run in runs:
            run.stop()
        for run in runs:
            run.join(_STOP_SECONDS)

    def create(
        self, owner: str, file_id: str, endpoint: str, window: tuple[str, int], metadata: dict[str, str] | None
    ) -> BatchRecord:
        """Queue a new batch.

        Args:
            owner: Whose it is.
            file_id: The file of its requests.
            endpoint: A key of ENDPOINTS.
            window: Its `completion_window`, and that in seconds.
            metadata: What the client notes of it.

        Raises:
            ApiError: The client has no such file, or there are too many batches.
        """
        found = self._files.get(file_id, owner)
        if found.purpose != BATCH:
            message = f"input_file_id: expected a file of the purpose {BATCH}, got {found.purpose}"
            raise ApiError(400, message, "input_file_id")
        with self._lock:
            if sum(not record.ended for record in self._records.values()) >= MOST_WAITING:
                raise ApiError(429, f"expected at most {MOST_WAITING:,} batches that are not done; try again later")
            serial = self._serial + 1
            batch_id, now = f"batch_{secrets.token_hex(12)}", int(time.time())
            record = BatchRecord(batch_id, owner, serial, endpoint, file_id, *window, now, metadata)
            save(record, self._means.folder)
            self._serial, self._records[record.id] = serial, record
        self._start_next()
        return record

    def get(self, batch_id: str, owner: str) -> BatchRecord:
        """Return a batch of a client.

        Raises:
            ApiError: The client has no such batch.
        """
        with self._lock:
            record = self._records.get(batch_id)
        if record is None or record.owner != owner:
            raise ApiError(
                404, f"expected the id of a batch, got {printable(batch_id)[:80]!r}", "batch_id", "not_found"
            )
        return record

    def of(self, owner: str) -> list[BatchRecord]:
        """Return the batches of a client, the newest first."""
        with self._lock:
            return sorted((r for r in self._records.values() if r.owner == owner), key=lambda r: -r.serial)

    def cancel(self, batch_id: str, owner: str) -> BatchRecord:
        """Cancel a batch of a client that is not done; it keeps the answers that there are.

        Raises:
            ApiError: The client has no such batch, or it is done.
        """
        record = self.get(batch_id, owner)
        with self._lock:
            if record.status in ("validating", "in_progress"):
                record.cancelling_at, record.status = int(time.time()), "cancelling"
                save(record, self._means.folder)
            elif record.status != "cancelling":
                message = f"expected a batch that is validating or in_progress, got one that is {record.status}"
                raise ApiError(409, message, "batch_id", "conflict")
            if run := self._runs.get(record.id):
                run.wake()
        return record

    def require_unused(self, file_id: str) -> None:
        """Raise ApiError if a batch that is not done reads a file."""
        with self._lock:
            users = [r.id for r in self._records.values() if r.input_file_id == file_id and not r.ended]
        if users:
            raise ApiError(409, f"expected a file that no batch reads, got one that {users[0]} does", "id", "in_use")

    @property
    def running(self) -> int:
        """Return how many batches run."""
        return len(self._runs)

    def _share(self) -> int:
        return max(self._most_rows // max(len(self._runs), 1), 1)

    def _start_next(self) -> None:
        """Start batches while there is room: of the client with the fewest running ones the oldest."""
        with self._lock:
            while not self._stopped and len(self._runs) < MOST_RUNNING:
                waiting = [r for r in self._records.values() if not r.ended and r.id not in self._runs]
                if not waiting:
                    return
                held = Counter(run.record.owner for run in self._runs.values())
                record = min(waiting, key=lambda r: (held[r.owner], r.serial))
                run = BatchRun(record, self._means, self._lock, partial(self._ended, record.id))
                self._runs[record.id] = run
                run.start()

    def _ended(self, batch_id: str) -> None:
        with self._lock:
            self._runs.pop(batch_id, None)
            failed_here = not self._records[batch_id].ended  # the server ends, or the desk takes no more rows
            self._stopped = self._stopped or failed_here
        self._start_next()
