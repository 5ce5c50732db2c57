"""Files of clients on disk: each has an id that is made here, a content, and a small JSON file that says what it is.

The JSON file is written after the content and removed before it, so that a file is either whole or not there.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hpcdecode.requests.values import printable
from hpcdecode.serve.errors import ApiError
from hpcdecode.system.durable import fresh, publish, sync, write_whole

BATCH, BATCH_OUTPUT = "batch", "batch_output"  # purposes
PURPOSES = (BATCH, BATCH_OUTPUT)
_ID = re.compile(r"file-[0-9a-f]{24}")
_NAME_CHARACTERS = 255
logger = logging.getLogger(__name__)


class FileRecord(msgspec.Struct):
    """What is known of a file.

    Attributes:
        id: Its id, and the name of its content on disk.
        owner: Of the client that it belongs to; see owners.py.
        bytes: Size of the content.
        created_at: Unix time.
        filename: The client's name for it, which is shown and names nothing.
        purpose: One of PURPOSES.
        serial: Number that orders files of the same second.
    """

    id: str
    owner: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    serial: int = 0

    def shown(self) -> dict[str, Any]:
        """Return the file object of the OpenAI API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """The files of all clients in a folder. Any thread may use it.

    Args:
        folder: The folder, which is made if it is not there. Only one process may use it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._records = {record.id: record for record in map(_read, sorted(folder.glob("*.json"))) if record}
        self._serial = max((record.serial for record in self._records.values()), default=0)
        for path in folder.iterdir():  # of uploads and deletions that were interrupted
            if path.suffix == ".tmp" or (_ID.fullmatch(path.name) and path.name not in self._records):
                path.unlink()

    def path(self, record: FileRecord) -> Path:
        """Return where the content of a file is."""
        return self.folder / record.id

    def get(self, file_id: str, owner: str) -> FileRecord:
        """Return a file of a client.

        Raises:
            ApiError: The client has no such file.
        """
        with self._lock:
            record = self._records.get(file_id)
        if record is None or record.owner != owner:
            raise ApiError(404, f"expected the id of a file, got {printable(file_id)[:80]!r}", "id", "not_found")
        return record

    def of(self, owner: str, purpose: str | None = None) -> list[FileRecord]:
        """Return the files of a client, the newest first."""
        with self._lock:
            own = [r for r in self._records.values() if r.owner == owner and purpose in (None, r.purpose)]
        return sorted(own, key=lambda r: r.serial, reverse=True)

    def draft(self, owner: str, purpose: str, file_id: str | None = None) -> Draft:
        """Return a new file to write. One with the same id is replaced once it is published."""
        file_id = file_id or f"file-{secrets.token_hex(12)}"
        return Draft(self.folder, FileRecord(file_id, owner, 0, int(time.time()), file_id, purpose), self._publish)

    def delete(self, file_id: str, owner: str) -> None:
        """Remove a file of a client.

        Raises:
            ApiError: The client has no such file.
        """
        record = self.get(file_id, owner)
        with self._lock:
            if self._records.pop(record.id, None) is None:
                return
            self._place(record).unlink(missing_ok=True)
            sync(self.folder)
            self.path(record).unlink(missing_ok=True)

    def _publish(self, temporary: Path, record: FileRecord) -> None:
        """Make a written file one of the store; it is durable on return."""
        publish(temporary, self.path(record))
        with self._lock:
            self._serial += 1
            record.serial = self._serial
            write_whole(self._place(record), msgspec.json.encode(record))
            self._records[record.id] = record

    def _place(self, record: FileRecord) -> Path:
        return self.folder / f"{record.id}.json"


class Draft:
    """A file that is written, and that nobody sees before it is published. A context manager that removes it else.

    Args:
        folder: Folder of the store.
        record: What is known of the file; its size and name are set here.
        publish: Takes the written content's path and the record.
    """

    def __init__(self, folder: Path, record: FileRecord, publish: Callable[[Path, FileRecord], None]):
        self.record = record
        self._publish = publish
        self._temporary = folder / f"{record.id}.tmp"
        self._file = os.fdopen(fresh(self._temporary), "wb", 1 << 20)

    def write(self, data: bytes | memoryview) -> None:
        """Append to the content."""
        self._file.write(data)
        self.record.bytes += len(data)

    def name(self, filename: str) -> None:
        """Set the name that is shown: the last part of the client's path, on one line."""
        last = re.split(r"[/\\]", filename)[-1]
        self.record.filename = printable(last.encode(errors="replace").decode())[:_NAME_CHARACTERS] or self.record.id

    def publish(self) -> FileRecord:
        """Make it one of the store's files; it is durable on return."""
        self._file.close()
        self._publish(self._temporary, self.record)
        return self.record

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _read(path: Path) -> FileRecord | None:
    """Return what a JSON file says, or None with a warning if it is damaged or its content is missing."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=FileRecord)
        size = path.with_suffix("").stat().st_size
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
        logger.warning(f"hpcdecode: {path}: left out: {printable(e)}")
        return None
    whole = record.id == path.stem and _ID.fullmatch(record.id) and size == record.bytes
    if not whole:
        logger.warning(f"hpcdecode: {path}: left out: expected the state of a whole file, got another")
    return record if whole else None
