"""The requests of a batch's file: reads them one at a time, and refuses those that are not of the batch's endpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpcdecode.data.prompts.batch_format import is_request
from hpcdecode.data.prompts.files import RawRow, json_lines
from hpcdecode.data.prompts.order import PromptContent, by_beginning, of_messages
from hpcdecode.data.prompts.row_template import SOURCES
from hpcdecode.data.prompts.rows import RowError, id_of, row_error, row_fields
from hpcdecode.errors import RowProblem
from hpcdecode.requests.values import shown


class BatchRow(NamedTuple):
    """A request of a batch.

    Attributes:
        line: Its line in the file, from 1.
        id: Its `custom_id`, or the line.
        fields: Those of the line.
        size: Bytes of the line.
    """

    line: int
    id: str
    fields: dict[str, Any]
    size: int


def batch_rows(
    path: Path, endpoint: str, models: Collection[str], done: Callable[[int], bool]
) -> Iterator[BatchRow | RowError]:
    """Yield the requests of a file that are not done, those whose prompts begin alike one after the other.

    Args:
        path: The file.
        endpoint: The only `url` that a request may have.
        models: Names by which requests may ask for the model, beside those of its directory.
        done: Returns whether the request of a line is done.
    """
    rows = (_row(raw, endpoint, models) for raw in json_lines(str(path)) if not done(raw.number))
    return by_beginning(rows, _content_of)


def _content_of(row: BatchRow) -> PromptContent:
    """Return a request's prompt or messages, as far as it has what it should."""
    body = row.fields["body"] if isinstance(row.fields["body"], dict) else {}
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, str) else of_messages(body.get("tools"), body.get("messages"))


def first_problem(path: Path, most_rows: int) -> tuple[int, RowProblem | None, int]:
    """Return the number of requests of a file, why the batch cannot begin, or None, and the line of that.

    A batch cannot begin if its file has no requests or too many, or its first line is no JSON object.
    """
    count = 0
    for raw in json_lines(str(path)):
        count += 1
        if count == 1:
            try:
                row_fields(raw.data)
            except RowProblem as problem:
                return 0, problem, raw.number
        if count > most_rows:
            return 0, RowProblem(f"expected at most {most_rows:,} requests, got more; divide the file"), raw.number
    return count, None if count else RowProblem("expected a request on each line, got an empty file"), 1


def _row(raw: RawRow, endpoint: str, models: Collection[str]) -> BatchRow | RowError:
    row_id = None
    try:
        fields = row_fields(raw.data)
        row_id = id_of(fields, raw.number)
        if not is_request(fields) or any(name in fields for name in SOURCES):
            raise RowProblem("expected custom_id, method, url and body of a request, got other fields")
        if fields["url"] != endpoint:
            raise RowProblem(f"url: expected {endpoint}, the endpoint of the batch, got {shown(fields['url'])}")
        body = fields["body"]
        if isinstance(body, dict) and body.get("model") in models:
            fields = {**fields, "body": {name: value for name, value in body.items() if name != "model"}}
    except RowProblem as e:
        return row_error(raw.number, row_id, e)
    return BatchRow(raw.number, row_id, fields, len(raw.data) if isinstance(raw.data, bytes) else 0)
