"""Prompt files of every kind as one stream of raw rows: JSON Lines (plain, gzip, zstd, stdin), Parquet and HDF5."""

from __future__ import annotations

import glob
import gzip
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from hpcdecode.config import STDIN
from hpcdecode.data.prompts.tables import TABLES, optional, table_rows
from hpcdecode.data.prompts.unknown import UnknownFields
from hpcdecode.data.prompts.values import printable
from hpcdecode.errors import UserError, first_line

MAX_LINE_BYTES = 64 << 20
MAX_SKIPPED_BYTES = 1 << 30  # of a line beyond that: what is longer is no line, perhaps gigabytes of zeros in megabytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20


class RawRow(NamedTuple):
    """A row before it is looked at. Rows are numbered from 1 through all files, blank lines included."""

    number: int
    place: str  # "FILE:LINE: " where there are several files, else ""
    data: bytes | dict[str, Any] | None  # a line of JSON, the columns of a table's row, or None for too long a line


def resolve(paths: Sequence[str]) -> list[str]:
    """The input files that `paths` name: wildcards expanded and sorted. Raises UserError where one cannot be read."""
    files: list[str] = []
    for path in paths:
        matches = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        if not matches:
            raise UserError(f"prompt file {printable(path)}: expected files that match this pattern, found none")
        files += matches
    for path in files:
        if path != STDIN and (os.path.isdir(path) or not os.path.exists(path)):
            what = "is a directory" if os.path.isdir(path) else "does not exist"
            raise UserError(f"prompt file {printable(path)}: expected a file of prompts, but it {what}")
    if files.count(STDIN) > 1:
        raise UserError("prompt files: expected - (standard input) once at most")
    return files


def raw_rows(files: Sequence[str], column: str | None, unknown: UnknownFields) -> Iterator[RawRow]:
    """Every row of `files` that is not blank, in order; memory is bounded by the longest line.

    The first file is opened now. column: the prompt's column of a table (`prompt`). unknown: knows the columns to read
    beside it. Raises UserError if a file cannot be opened or read.
    """
    readers = (_reader(path, column, unknown) for path in files)
    first = next(readers)
    return _numbered(files, first, readers)


def _numbered(files: Sequence[str], first: Iterator, rest: Iterator[Iterator]) -> Iterator[RawRow]:
    before = 0
    for path in files:
        line = 0
        for line, data in enumerate(first, start=1):
            if data is None or isinstance(data, dict) or (data and not data.isspace()):
                yield RawRow(before + line, f"{printable(path)}:{line}: " if len(files) > 1 else "", data)
        before += line
        first = next(rest, first)


def _reader(path: str, column: str | None, unknown: UnknownFields) -> Iterator[bytes | dict[str, Any] | None]:
    if path.endswith(TABLES):
        return _table(path, column, unknown)
    with _reading(path):
        file = _open(path)
    return _lines(file, path)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what a reader raises into a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        named = f"prompt file {printable(path)}"
        if isinstance(e, OSError) and e.strerror:
            raise UserError(f"{named}: reading failed: {e.strerror}") from e
        expected = isinstance(e, (OSError, EOFError, zlib.error, ValueError)) or type(e).__name__ == "ZstdError"
        got = printable(e if expected else first_line(e))  # readers of tables raise whatever they stumble over
        raise UserError(f"{named}: expected a whole file of its kind, got: {got}") from e


def _open(path: str) -> BinaryIO:
    if path == STDIN:
        return sys.stdin.buffer
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        return _open_zstd(path)
    return open(path, "rb", buffering=_CHUNK_BYTES)


def _open_zstd(path: str) -> BinaryIO:
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return optional(name, path, "zstd").open(path, "rb")


def _table(path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    with _reading(path):
        yield from table_rows(path, column, unknown)


def _lines(file: BinaryIO, path: str) -> Iterator[bytes | None]:
    """Yield lines as bytes; None for one that is too long, of which no more than the limit is ever held."""
    first = True
    with file, _reading(path):
        while data := file.readline(MAX_LINE_BYTES + 1):
            if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
                _skip_line(file)
                data = None
            elif first:
                data = data.removeprefix(BYTE_ORDER_MARK)
            first = False
            yield data


def _skip_line(file: BinaryIO) -> None:
    """Read on to the end of a line. Raises ValueError if that is too far away."""
    skipped = 0
    while (data := file.readline(_CHUNK_BYTES)) and not data.endswith(b"\n"):
        skipped += len(data)
        if skipped > MAX_SKIPPED_BYTES:
            raise ValueError(f"a line of more than {MAX_SKIPPED_BYTES >> 30} GiB")
