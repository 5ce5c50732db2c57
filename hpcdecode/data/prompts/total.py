"""Counts the rows of prompt files in the background, so that a job can say how much of it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import h5py

from hpcdecode.data.prompts.arrow import count_arrow_rows
from hpcdecode.data.prompts.content import FileFormat
from hpcdecode.data.prompts.delimited import without_quoted
from hpcdecode.data.prompts.extras import import_extra
from hpcdecode.data.prompts.json_array import count_elements
from hpcdecode.data.prompts.opening import is_once, open_prompts
from hpcdecode.requests.shard import Shard

_PAUSE = 3.0  # times the time that counting takes
T = TypeVar("T")
_CHUNK_BYTES = 1 << 20


class RowTotal:
    """The number of rows that a job has, once it is counted.

    Args:
        files: Prompt files; rows of standard input and of other pipes are not counted.
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
        if not any(map(is_once, files)):
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
    file, form = open_prompts(path)
    with file:
        if form is FileFormat.PARQUET:
            return int(import_extra("pyarrow.parquet", path, "parquet").ParquetFile(path).metadata.num_rows)
        if form is FileFormat.ARROW:
            return count_arrow_rows(path)
        if form is FileFormat.HDF5:
            with h5py.File(path, locking=False) as table:
                names = (column,) if column else ("prompt", "messages", "prompt_token_ids")
                return next(len(table[name]) for name in names if name in table)
        if form is FileFormat.ARRAY:
            return max(_at_ease(count_elements(file)), default=0)
        if form in (FileFormat.CSV, FileFormat.TSV):
            return max(_lines(_at_ease(without_quoted(file))) - 1, 0)
        return _lines(iter(partial(file.read, _CHUNK_BYTES), b""))


def _at_ease(pieces: Iterator[T]) -> Iterator[T]:
    """Yield pieces of work in Python with pauses, so that the job's own threads get on."""
    while True:
        start = time.perf_counter()
        try:
            piece = next(pieces)
        except StopIteration:
            return
        yield piece
        time.sleep(_PAUSE * (time.perf_counter() - start))


def _lines(chunks: Iterator[bytes]) -> int:
    """Return the number of lines that are not blank."""
    rows, filled = 0, False  # whether the line that has begun is not blank
    for data in chunks:
        first, *others = data.split(b"\n")
        filled = filled or _is_filled(first)
        if others:
            rows += filled + sum(map(_is_filled, others[:-1]))
            filled = _is_filled(others[-1])
    return rows + filled


def _is_filled(part: bytes) -> bool:
    return bool(part) and not part.isspace()
