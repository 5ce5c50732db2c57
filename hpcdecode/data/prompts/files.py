"""Reads prompt files of every format as one stream of rows; `content.py` tells the formats apart."""

from __future__ import annotations

import glob
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from hpcdecode.config import LITERAL, STDIN
from hpcdecode.data.prompts.content import BYTE_ORDER_MARK, FileFormat
from hpcdecode.data.prompts.delimited import delimited_rows
from hpcdecode.data.prompts.folders import folder_files
from hpcdecode.data.prompts.json_array import array_elements
from hpcdecode.data.prompts.opening import is_once, open_prompts
from hpcdecode.data.prompts.standard_input import FarEnough
from hpcdecode.data.prompts.tables import table_rows
from hpcdecode.data.prompts.unknown import UnknownFields
from hpcdecode.errors import RowProblem, UserError, first_line
from hpcdecode.requests.values import printable

MAX_LINE_BYTES = 64 << 20
MAX_SKIPPED_BYTES = 1 << 30  # of a longer line; a compressed file may hold gigabytes without the end of a line
_CHUNK_BYTES = 1 << 20


# A line of JSON, the values of a table's row, None for too long a line, or why there is nothing.
RawData = bytes | dict[str, Any] | RowProblem | None


class RawRow(NamedTuple):
    """A row of a prompt file before it is parsed.

    Attributes:
        number: Number of the row, counted from 1 through all files: lines of JSON, blank ones too; elements of an
            array; records of CSV after the header, without blank ones; rows of tables.
        place: `FILE:LINE: ` if there are several files, else an empty text.
        data: Content of the row.
    """

    number: int
    place: str
    data: RawData


class LineFile(Protocol):
    """A binary file that is read line by line and closed at the end of a `with` block."""

    def readline(self, size: int, /) -> bytes:
        """Return a line, or the first `size` bytes of a longer one; nothing at the end of the file."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; nothing at the end of the file."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> object: ...


def resolve(paths: Sequence[str]) -> list[str]:
    """Return the prompt files that `paths` name, with the matches of each pattern sorted, and the files of folders.

    Raises:
        UserError: A file does not exist, or a pattern has no match.
    """
    files: list[str] = []
    for path in paths:
        matches = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        if not matches:
            raise UserError(f"prompt file {printable(path)}: expected files that match this pattern, found none")
        files += matches
    for path in files:
        if path != STDIN and not path.startswith(LITERAL) and not os.path.exists(path):
            raise UserError(f"prompt file {printable(path)}: expected a file of prompts, but it does not exist")
    files = [file for path in files for file in (folder_files(path) if _is_folder(path) else [path])]
    if files.count(STDIN) > 1:
        raise UserError("prompt files: expected - (standard input) once at most")
    return files


def _is_folder(path: str) -> bool:
    return path != STDIN and not path.startswith(LITERAL) and os.path.isdir(path)


def require_formats(files: Sequence[str]) -> None:
    """Raise UserError if a file is of a wrong kind, or cannot be read. What can be read only once is left out."""
    for path in files:
        if is_once(path):
            continue
        with _reading(path):
            open_prompts(path)[0].close()


def raw_rows(files: Sequence[str], column: str | None, unknown: UnknownFields) -> Iterator[RawRow]:
    """Return an iterator over the rows of files, in order, without blank lines.

    Only the longest line bounds the memory that it needs. The first file is opened now.

    Args:
        files: Paths, or `-` for standard input.
        column: Column of a table that holds the prompt; None for the columns that rows of JSON have.
        unknown: Knows the names of the other columns to read.

    Raises:
        UserError: A file cannot be opened or read.
    """
    readers = (_reader(path, column, unknown) for path in files)
    first = next(readers)
    return _numbered(files, first, readers)


def json_lines(path: str) -> Iterator[RawRow]:
    """Return an iterator over the lines of a file of JSON Lines, whatever its content looks like, without blank ones.

    Raises:
        UserError: The file cannot be opened or read.
    """
    with _reading(path):
        file = open(path, "rb")  # noqa: SIM115
    return _numbered([path], _lines(file, path), iter(()))


def _numbered(files: Sequence[str], first: Iterator[RawData], rest: Iterator[Iterator[RawData]]) -> Iterator[RawRow]:
    """Yield the rows of all files with their numbers; `rest` opens the files after the first."""
    before = 0
    for path in files:
        line, named = 0, len(files) > 1 and not path.startswith(LITERAL)
        for line, data in enumerate(first, start=1):
            if not isinstance(data, bytes) or (data and not data.isspace()):
                yield RawRow(before + line, f"{printable(path)}:{line}: " if named else "", data)
        before += line
        first = next(rest, first)


def _reader(path: str, column: str | None, unknown: UnknownFields) -> Iterator[RawData]:
    with _reading(path):
        file, form = open_prompts(path)
    if form.is_table:
        file.close()
        return _table(form, path, column, unknown)
    if form is FileFormat.ARRAY:
        return _array(file, path)
    if form in (FileFormat.CSV, FileFormat.TSV):
        return _records(file, path, "\t" if form is FileFormat.TSV else ",", column, unknown)
    return _lines(file, path)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn exceptions of a reader into a UserError that names the file."""
    try:
        yield
    except (UserError, FarEnough):
        raise
    except Exception as e:
        named = f"prompt file {printable(path)}"
        if isinstance(e, OSError) and e.strerror:
            raise UserError(f"{named}: reading failed: {e.strerror}") from e
        expected = isinstance(e, (OSError, EOFError, zlib.error, ValueError)) or type(e).__name__ == "ZstdError"
        got = printable(e if expected else first_line(e))  # readers of tables raise exceptions of any type
        raise UserError(f"{named}: expected a whole file of its kind, got: {got}") from e


def _table(form: FileFormat, path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    with _reading(path):
        yield from table_rows(form, path, column, unknown)


def _array(file: LineFile, path: str) -> Iterator[bytes | None]:
    with file, _reading(path):
        yield from array_elements(file, MAX_LINE_BYTES, MAX_SKIPPED_BYTES // 8)


def _records(
    file: LineFile, path: str, delimiter: str, column: str | None, unknown: UnknownFields
) -> Iterator[dict[str, Any] | RowProblem]:
    with file, _reading(path):
        yield from delimited_rows(file, path, delimiter, column, unknown, MAX_LINE_BYTES)


def _lines(file: LineFile, path: str) -> Iterator[bytes | None]:
    """Yield the lines of a file, and None for each that is too long. No more than the limit is ever in memory."""
    first = True
    with file, _reading(path):
        while data := file.readline(MAX_LINE_BYTES + 1):
            if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
                _skip_line(file)
                yield None
            else:
                yield data.removeprefix(BYTE_ORDER_MARK) if first else data
            first = False


def _skip_line(file: LineFile) -> None:
    """Read the rest of a line. Raises ValueError if it is longer than MAX_SKIPPED_BYTES."""
    skipped = 0
    while (data := file.readline(_CHUNK_BYTES)) and not data.endswith(b"\n"):
        skipped += len(data)
        if skipped > MAX_SKIPPED_BYTES:
            raise ValueError(f"a line of more than {MAX_SKIPPED_BYTES >> 30} GiB")
