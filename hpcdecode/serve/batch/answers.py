"""The files that answer a batch: one of the requests that were honoured, and one of those that were not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from hpcdecode.data.results.openai_batch import answers
from hpcdecode.data.results.read import Results
from hpcdecode.serve.batch.flow import EXPIRED
from hpcdecode.serve.batch.record import ENDPOINTS, BatchRecord
from hpcdecode.serve.files.store import BATCH_OUTPUT, FileStore

_EXPIRED_CODE = "batch_expired"


def write_answers(
    record: BatchRecord, results: Path, store: FileStore, models: Sequence[str]
) -> tuple[str | None, str | None]:
    """Write the answers of a batch, in the order of its requests; a second call replaces them.

    The lines are those of `hpcdecode export --to openai-batch`.

    Args:
        record: The batch.
        results: Its results file.
        store: Where the files go.
        models: Names of the model, of which answers have the first, but for those of adapters; if there are none, that
            of its directory.

    Returns:
        The ids of the two files, each None if there are no such requests.
    """
    with ExitStack() as stack:
        found = stack.enter_context(Results(results))
        both = [
            stack.enter_context(store.draft(record.owner, BATCH_OUTPUT, _file_id(record, kind)))
            for kind in ("output", "error")
        ]
        for kind, draft in zip(("output", "error"), both, strict=True):
            draft.name(f"{record.id}_{kind}.jsonl")
        for answer in answers(found, found, ENDPOINTS[record.endpoint], models[0] if models else ""):
            error = answer["error"]
            if error and error["message"] == EXPIRED:
                error["code"] = _EXPIRED_CODE
            line = msgspec.json.encode(answer, enc_hook=lambda value: value.tolist())
            both[error is not None].write(line + b"\n")
        output, errors = (draft.publish().id if draft.record.bytes else None for draft in both)
    return output, errors


def _file_id(record: BatchRecord, kind: str) -> str:
    """Return the id of a batch's file: always the same, so that files are not doubled when they are written again."""
    return f"file-{hashlib.sha256(f'{record.id} {kind}'.encode()).hexdigest()[:24]}"
