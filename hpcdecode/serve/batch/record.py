"""The state of a batch, which outlives the server: a small JSON file for each."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import msgspec

from hpcdecode.data.results.openai_body import URLS
from hpcdecode.requests.values import printable
from hpcdecode.system.durable import write_whole

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "cancelled", "expired"]
ENDED = ("failed", "completed", "expired", "cancelled")
ENDPOINTS = {url: name for name, url in URLS.items()}  # as the exporter calls them
logger = logging.getLogger(__name__)


class BatchProblem(msgspec.Struct):
    """Why a batch has failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct):
    """A batch.

    Attributes:
        owner: Of the client that it belongs to.
        serial: Number that orders batches, from 1.
        window: Seconds from its creation until it expires.
        made_with: Name of what its tokens depend on, set when it begins.
        ending: What it becomes once its answers are written; None while its rows are not done.
        total: Requests of its file; 0 until they are counted.
        completed: Requests that have answers.
        failed: Requests that have errors.
    """

    id: str
    owner: str
    serial: int
    endpoint: str
    input_file_id: str
    completion_window: str
    window: int
    created_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    made_with: str = ""
    ending: Ending | None = None
    errors: list[BatchProblem] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def ended(self) -> bool:
        """Return whether nothing more will happen to it."""
        return self.status in ENDED

    @property
    def expires_at(self) -> int:
        """Return the Unix time at which it expires."""
        return self.created_at + self.window

    def shown(self) -> dict[str, Any]:
        """Return the batch object of the OpenAI API."""
        errors = {"object": "list", "data": [msgspec.to_builtins(e) for e in self.errors]} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def save(record: BatchRecord, folder: Path) -> None:
    """Write a batch's state; it is durable on return."""
    write_whole(folder / f"{record.id}.json", msgspec.json.encode(record))


def load(folder: Path) -> list[BatchRecord]:
    """Return the batches of a folder, the oldest first; those that cannot be read are left out with a warning."""
    found = []
    for path in sorted(folder.glob("batch_*.json")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            logger.warning(f"hpcdecode: {path}: left out: {printable(e)}")
            continue
        if record.id == path.stem and record.endpoint in ENDPOINTS:
            found.append(record)
        else:
            logger.warning(f"hpcdecode: {path}: left out: expected the state of a batch, got another")
    return sorted(found, key=lambda r: r.serial)
