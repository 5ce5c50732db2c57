"""Reads CSV and TSV as RFC 4180 has them: a header, quotes, and fields with line ends in them. Values are text."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import msgspec

from hpcdecode.data.prompts.columnar import used_columns
from hpcdecode.data.prompts.content import BYTE_ORDER_MARK
from hpcdecode.data.prompts.continuations import LISTS
from hpcdecode.data.prompts.fields import OPENAI_LOGPROBS, OPENAI_MAX_TOKENS, RESPONSE_FORMAT
from hpcdecode.data.prompts.messages import CHAT_FIELDS
from hpcdecode.data.prompts.unknown import UnknownFields
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.requests.params import sampling_kinds
from hpcdecode.requests.values import printable

_MAX_COLUMNS = 10_000
_CHUNK_BYTES = 1 << 20


class LineReader(Protocol):
    """A binary file that is read line by line."""

    def readline(self, size: int, /) -> bytes:
        """Return a line, or the first `size` bytes of a longer one; nothing at the end of the file."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; nothing at the end of the file."""


def delimited_rows(
    file: LineReader, path: str, delimiter: str, column: str | None, unknown: UnknownFields, most: int
) -> Iterator[dict[str, Any] | RowProblem]:
    """Yield the records after the header as dicts of values by column, without blank lines.

    Values are text, and bytes if it is not UTF-8. Fields of sampling and conversations are JSON if they can be, and
    left out if they are empty. A record that cannot be read is a RowProblem.

    Args:
        file: The file.
        path: Its path, for messages.
        delimiter: What is between two fields.
        column: Column of the prompts; None for the fields of JSON rows.
        unknown: Knows the names of the other columns to read.
        most: Most bytes of a record.

    Raises:
        UserError: There is no such column, or no usable header.
        ValueError: A record is longer than that; perhaps its quotes are not closed.
    """
    csv.field_size_limit(max(csv.field_size_limit(), most))  # a record is bounded as a whole
    lines = _Lines(file, most)
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    names = _header(records, path)
    if names is None:
        return
    used = set(used_columns(path, names, column, unknown))
    json = [name for name in used & (_json_fields() | LISTS & unknown.known) if name != column]
    while True:
        lines.size = 0
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            yield RowProblem(f"expected a record of {_kind(delimiter)}, got: {error}")
            continue
        if not record:
            continue
        if len(record) != len(names):
            yield RowProblem(f"expected {len(names)} fields as in the header, got {len(record)}")
            continue
        row: dict[str, Any] = {name: _text(value) for name, value in zip(names, record, strict=True) if name in used}
        for name in json:
            if (value := _decoded(row[name])) is None:
                del row[name]
            else:
                row[name] = value
        yield row


class _Lines:
    """The lines of a file as text, in which bytes that are no UTF-8 are surrogates.

    Attributes:
        size: Bytes since it was set to 0; more than `most` raise ValueError.
    """

    def __init__(self, file: LineReader, most: int) -> None:
        self._file, self._most = file, most
        self.size = 0
        self._first = True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        data = self._file.readline(self._most + 1)
        if not data:
            raise StopIteration
        self.size += len(data)
        if self.size > self._most:
            raise ValueError(f"a record of more than {self._most} bytes; are its quotes closed?")
        data = data.removeprefix(BYTE_ORDER_MARK) if self._first else data
        self._first = False
        if data.isspace() and self.size == len(data):
            self.size = 0
            return "\n"  # a blank line is no record of one field
        return data.decode("utf-8", "surrogateescape")


def _header(records: Iterator[list[str]], path: str) -> list[str] | None:
    """Return the names of the columns, or None if there is nothing in the file."""
    try:
        names = next((record for record in records if record), None)
    except csv.Error as error:
        raise UserError(f"prompt file {printable(path)}: expected a header of columns, got: {error}") from error
    if names is None:
        return None
    if len(names) > _MAX_COLUMNS:
        raise UserError(
            f"prompt file {printable(path)}: expected at most {_MAX_COLUMNS} columns in the header, got {len(names)}"
        )
    names = [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip() for name in names]
    return [name or f"unnamed_{number}" for number, name in enumerate(names, 1)]


def _text(value: str) -> str | bytes:
    """Return text, or the bytes that it was if they are no UTF-8."""
    if value.isascii():
        return value
    data = value.encode("utf-8", "surrogateescape")
    try:
        data.decode()
    except UnicodeDecodeError:
        return data
    return value


@cache
def _json_fields() -> frozenset[str]:
    """Return the names of the fields whose values are no text."""
    kinds = {name for name, kind in sampling_kinds().items() if kind is not str}
    others = (OPENAI_LOGPROBS, OPENAI_MAX_TOKENS, RESPONSE_FORMAT, *CHAT_FIELDS)
    return frozenset((*kinds, *others, "messages", "prompt_token_ids"))


def _decoded(text: str | bytes) -> Any:
    """Return the value that a text is as JSON, None if it is empty, or the text itself."""
    if not text.strip():
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text


def _kind(delimiter: str) -> str:
    return "TSV" if delimiter == "\t" else "CSV"


def without_quoted(file: LineReader) -> Iterator[bytes]:
    """Yield the pieces of a file, each with `""` in place of what is quoted."""
    inside = False
    while data := file.read(_CHUNK_BYTES):
        parts: Sequence[bytes] = data.split(b'"')
        yield b'""'.join([*parts[inside::2], b""] if inside else parts[::2])
        inside ^= len(parts) % 2 == 0
