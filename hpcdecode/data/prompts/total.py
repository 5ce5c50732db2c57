"""Counts the rows of prompt files in the background, so that a job can say how much of it is done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import h5py

from hpcdecode.config import STDIN, Shard
from hpcdecode.data.prompts.extras import import_extra
from hpcdecode.data.prompts.files import LineFile, open_lines
from hpcdecode.data.prompts.tables import TABLES

_CHUNK_BYTES = 1 << 20


class RowTotal:
    """The number of rows that a job has, once it is counted.

    Args:
        files: Prompt files; the rows of standard input are not counted.
        column: Name of the prompts' column; None for `prompt`.
        limit: Most rows to take; None for all.
        shard: Part of the rows; None for all of them.
    """

    def __init__(
        self, files: Sequence[str], column: str | None = None, limit: int | None = None, shard: Shard | None = None
    ) -> None:
        self._arguments = files, column
        self._limit, self._shard = limit, shard
        self._rows: int | None = None
        if STDIN not in files:
            threading.Thread(target=self._count, name="row-counter", daemon=True).start()

    @property
    def rows(self) -> int | None:
        """Number of rows, of a shard about; None if it is not known, or not yet."""
        if self._rows is None:
            return None
        rows = self._rows if self._limit is None else min(self._rows, self._limit)
        if self._shard is None:
            return rows
        return len(range(self._shard.index or self._shard.count, rows + 1, self._shard.count))

    def _count(self) -> None:
        with suppress(Exception):  # what is wrong with a file is said when its rows are read
            files, column = self._arguments
            self._rows = sum(_rows_of(path, column) for path in files)


def _rows_of(path: str, column: str | None) -> int:
    if path.endswith(".parquet"):
        return int(import_extra("pyarrow.parquet", path, "parquet").ParquetFile(path).metadata.num_rows)
    if path.endswith(TABLES):
        with h5py.File(path, locking=False) as file:
            names = (column,) if column else ("prompt", "messages", "prompt_token_ids")
            return next(len(file[name]) for name in names if name in file)
    with open_lines(path) as file:
        return _lines(file)


def _lines(file: LineFile) -> int:
    """Return the number of lines that are not blank."""
    rows, filled = 0, False  # whether the line that has begun is not blank
    while data := file.read(_CHUNK_BYTES):
        first, *others = data.split(b"\n")
        filled = filled or _is_filled(first)
        if others:
            rows += filled + sum(map(_is_filled, others[:-1]))
            filled = _is_filled(others[-1])
    return rows + filled


def _is_filled(part: bytes) -> bool:
    return bool(part) and not part.isspace()
