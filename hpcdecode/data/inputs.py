"""Prompt files of every kind as one stream of raw rows: JSON Lines (plain, gzip, zstd, stdin), Parquet and HDF5."""

from __future__ import annotations

import glob
import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from hpcdecode.data.tables import TABLES, optional, table_rows
from hpcdecode.errors import UserError
from hpcdecode.job import STDIN

MAX_LINE_BYTES = 64 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20


class RawRow(NamedTuple):
    """A row before it is looked at. Rows are numbered from 1 through all files, blank lines included."""

    number: int
    place: str  # "FILE:LINE: " where there are several files, else ""
    data: bytes | dict[str, Any] | None  # a line of JSON, the columns of a table's row, or None for too long a line


def resolve(paths: Seq[str]) -> list[str]:
    """The input files that `paths` name: wildcards expanded and sorted. Raises UserError where one cannot be read."""
    files: list[str] = []
    for path in paths:
        matches = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        if not matches:
            raise UserError(f"prompt file {path}: expected files that match this pattern, found none")
        files += matches
    for path in files:
        if path != STDIN and (os.path.isdir(path) or not os.path.exists(path)):
            what = "is a directory" if os.path.isdir(path) else "does not exist"
            raise UserError(f"prompt file {path}: expected a file of prompts, but it {what}")
    if files.count(STDIN) > 1:
        raise UserError("prompt files: expected - (standard input) once at most")
    return files


def raw_rows(files: Seq[str], column: str | None, known: frozenset[str]) -> Iterator[RawRow]:
    """Every row of `files` that is not blank, in order; memory is bounded by the longest line.

    The first file is opened now. column: the prompt's column of a table (`prompt`). known: the columns to read beside
    it. Raises UserError where a file cannot be opened or read.
    """
    readers = (_reader(path, column, known) for path in files)
    first = next(readers)
    return _numbered(files, first, readers)


def _numbered(files: Seq[str], first: Iterator, rest: Iterator[Iterator]) -> Iterator[RawRow]:
    before = 0
    for path in files:
        line = 0
        for line, data in enumerate(first, start=1):
            if data is None or isinstance(data, dict) or (data and not data.isspace()):
                yield RawRow(before + line, f"{path}:{line}: " if len(files) > 1 else "", data)
        before += line
        first = next(rest, first)


def _reader(path: str, column: str | None, known: frozenset[str]) -> Iterator[bytes | dict[str, Any] | None]:
    if path.endswith(TABLES):
        return _table(path, column, known)
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
    except OSError as e:
        raise UserError(f"prompt file {path}: reading failed: {e.strerror or e}") from e
    except (EOFError, zlib.error, ValueError) as e:
        raise UserError(f"prompt file {path}: expected a whole file of its kind, got: {e}") from e
    except Exception as e:
        if type(e).__name__ not in ("ZstdError", "ArrowInvalid"):  # of packages that may be absent
            raise
        raise UserError(f"prompt file {path}: expected a whole file of its kind, got: {e}") from e


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


def _table(path: str, column: str | None, known: frozenset[str]) -> Iterator[dict[str, Any]]:
    with _reading(path):
        yield from table_rows(path, column, known)


def _lines(file: BinaryIO, path: str) -> Iterator[bytes | None]:
    """Lines as bytes; None for one that is too long, of which no more than the limit is ever held."""
    first = True
    with file, _reading(path):
        while data := file.readline(MAX_LINE_BYTES + 1):
            if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
                while data and not data.endswith(b"\n"):
                    data = file.readline(_CHUNK_BYTES)
                data = None
            elif first:
                data = data.removeprefix(BYTE_ORDER_MARK)
            first = False
            yield data
