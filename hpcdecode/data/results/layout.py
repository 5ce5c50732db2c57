"""The HDF5 layout of results files: the datasets that they have, and a writer for them.

    /rows/*             [n]         one entry per finished sequence
    /rows/token_ids     [total]     row i has the entries token_offsets[i]:token_offsets[i+1]
    /rows/top_logprobs  [total, k]  values of the k most likely tokens at each position
    /errors/*           [m]         one entry per row that could not be used

A final file, a segment (the rows of one commit) and the index (virtual datasets over segments) have the same datasets.
The offsets of a segment begin at its `base`, the number of entries in all segments before it, instead of 0. Therefore
the index can join the offsets of segments unchanged. A column with a `fill` exists only if some row has values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import h5py
import msgspec
import numpy as np

from hpcdecode.errors import InvariantViolation

STRING = h5py.string_dtype("utf-8")
FINISH_REASONS = {"stop": 0, "length": 1}
FINISH = h5py.enum_dtype(FINISH_REASONS, basetype="u1")
_NONE = float("nan")


class Column(NamedTuple):
    """The type of a dataset.

    Attributes:
        dtype: Type of its entries.
        fill: Value of entries that the row did not ask for; None if every row has a value.
        wide: The shape is [entries, k] instead of [entries].
    """

    dtype: np.dtype[Any]
    fill: float | None = None
    wide: bool = False


ROW_COLUMNS: dict[str, Column] = {
    "line": Column(np.dtype("i8")),
    "id": Column(STRING),
    "sample": Column(np.dtype("i4")),
    "text": Column(STRING),
    "finish_reason": Column(FINISH),
    "prompt_tokens": Column(np.dtype("i4")),
    "queued_at": Column(np.dtype("f8")),
    "first_token_at": Column(np.dtype("f8")),
    "finished_at": Column(np.dtype("f8")),
    "cumulative_logprob": Column(np.dtype("f8"), _NONE),
}
TOKENS, PROMPTS = "token_offsets", "prompt_offsets"
RAGGED: dict[str, dict[str, Column]] = {  # columns by the name of the offsets that divide them into rows
    TOKENS: {
        "token_ids": Column(np.dtype("i4")),
        "logprobs": Column(np.dtype("f4"), _NONE),
        "top_token_ids": Column(np.dtype("i4"), -1, wide=True),
        "top_logprobs": Column(np.dtype("f4"), _NONE, wide=True),
    },
    PROMPTS: {
        "prompt_token_ids": Column(np.dtype("i4"), -1),
        "prompt_logprobs": Column(np.dtype("f4"), _NONE),
        "prompt_top_token_ids": Column(np.dtype("i4"), -1, wide=True),
        "prompt_top_logprobs": Column(np.dtype("f4"), _NONE, wide=True),
    },
}
OFFSETS = {name: offsets for offsets, columns in RAGGED.items() for name in columns}
COLUMNS = ROW_COLUMNS | {name: column for columns in RAGGED.values() for name, column in columns.items()}
ERROR_COLUMNS: dict[str, Column] = {"line": Column(np.dtype("i8")), "id": Column(STRING), "reason": Column(STRING)}
OFFSETS_COLUMN = Column(np.dtype("i8"))

CHUNK_ROWS = 8192
CHUNK_TOKENS = 65536


class Extent(msgspec.Struct, frozen=True):
    """The size of a results file.

    Attributes:
        rows: Number of finished sequences.
        errors: Number of rows that could not be used.
        entries: Number of entries by the name of their offsets.
        widths: Second dimension of each column in the file; 1 if it is not wide.
    """

    rows: int
    errors: int
    entries: dict[str, int]
    widths: dict[str, int]

    @staticmethod
    def of(file: h5py.File) -> Extent:
        """Return the extent of an open file."""
        rows = file["rows"]
        ends = {name: rows[name] for name in RAGGED if name in rows}
        return Extent(
            rows=len(rows["line"]),
            errors=len(file["errors/line"]),
            entries={name: int(ends[name][-1] - ends[name][0]) if name in ends else 0 for name in RAGGED},
            widths={name: rows[name].shape[1] if COLUMNS[name].wide else 1 for name in COLUMNS if name in rows},
        )

    @staticmethod
    def sum(extents: list[Extent]) -> Extent:
        """Return the extent of a file with the rows of all files of these extents."""
        widths: dict[str, int] = {name: 1 for name, column in COLUMNS.items() if column.fill is None}
        for extent in extents:
            for name, width in extent.widths.items():
                widths[name] = max(widths.get(name, 0), width)
        entries = {name: sum(e.entries[name] for e in extents) for name in RAGGED}
        return Extent(sum(e.rows for e in extents), sum(e.errors for e in extents), entries, widths)

    def length(self, name: str) -> int:
        """Return the length of a column, whether or not it is in the file."""
        return self.entries[OFFSETS[name]] if name in OFFSETS else self.rows

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a column in the file."""
        return (self.length(name), self.widths[name]) if COLUMNS[name].wide else (self.length(name),)


class Table(msgspec.Struct):
    """Columns in memory, without those that no row has values for. Strings are bytes objects.

    Attributes:
        rows: Arrays [n] by column.
        lengths: Arrays [n] int64 by the name of their offsets: the number of entries of each row.
        entries: Arrays [sum of lengths] or [sum of lengths, k] by column.
        errors: Arrays [m] by column of the errors.
    """

    rows: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    entries: dict[str, np.ndarray]
    errors: dict[str, np.ndarray]

    def extent(self) -> Extent:
        """Return the extent of a file with these columns."""
        columns = self.rows | self.entries
        return Extent(
            rows=len(self.rows["line"]),
            errors=len(self.errors["line"]),
            entries={name: int(lengths.sum()) for name, lengths in self.lengths.items()},
            widths={name: values.shape[1] if COLUMNS[name].wide else 1 for name, values in columns.items()},
        )


class FileWriter:
    """Fills a new file with rows, which come in batches in their final order.

    Args:
        file: The open file.
        extent: The size that it will have.
        base: First offset by the name of the offsets, for a segment. None for a final file, which has offsets only for
            columns with entries.
    """

    def __init__(self, file: h5py.File, extent: Extent, base: Mapping[str, int] | None = None) -> None:
        self._columns = {
            name: create(file, f"rows/{name}", extent.shape(name), COLUMNS[name]) for name in extent.widths
        }
        self._errors = {
            name: create(file, f"errors/{name}", (extent.errors,), column) for name, column in ERROR_COLUMNS.items()
        }
        kept = [name for name in RAGGED if base is not None or extent.entries[name] or name == TOKENS]
        self._offsets = {name: create(file, f"rows/{name}", (extent.rows + 1,), OFFSETS_COLUMN) for name in kept}
        self._base = {name: base[name] if base else 0 for name in RAGGED}
        for name, offsets in self._offsets.items():
            offsets[0] = self._base[name]
        self._extent = extent
        self._row = self._error = 0  # written so far
        self._entry = dict.fromkeys(RAGGED, 0)  # written so far, by the name of their offsets

    def append_rows(
        self, rows: dict[str, np.ndarray], lengths: dict[str, np.ndarray], entries: dict[str, np.ndarray]
    ) -> None:
        """Append a batch of rows; the arguments are those of a `Table`."""
        n = len(rows["line"])
        if n == 0:
            return
        for name, values in rows.items():
            self._columns[name][self._row : self._row + n] = values
        for name, values in entries.items():
            start = self._entry[OFFSETS[name]]
            if values.size:
                place = (slice(start, start + len(values)), *map(slice, values.shape[1:]))
                self._columns[name][place] = values
        for name, counts in lengths.items():
            ends = np.cumsum(counts, dtype=np.int64)
            if name in self._offsets:
                self._offsets[name][self._row + 1 : self._row + 1 + n] = self._base[name] + self._entry[name] + ends
            self._entry[name] += int(ends[-1])
        self._row += n

    def append_errors(self, errors: dict[str, np.ndarray]) -> None:
        """Append a batch of errors, arrays [m] by column."""
        m = len(errors["line"])
        if m == 0:
            return
        for name, dataset in self._errors.items():
            dataset[self._error : self._error + m] = errors[name]
        self._error += m

    def check_full(self) -> None:
        """Raise InvariantViolation unless as many rows, errors and entries were written as the extent has."""
        extent = self._extent
        written = (self._row, self._error, self._entry)
        if written != (extent.rows, extent.errors, extent.entries):
            raise InvariantViolation(
                "a merge writes every row once",
                f"expected rows, errors and tokens {(extent.rows, extent.errors, extent.entries)}, got {written}",
            )


def create(file: h5py.File, name: str, shape: tuple[int, ...], column: Column) -> h5py.Dataset:
    """Create a dataset and return it.

    Numbers are chunked and compressed. Strings are only chunked, since HDF5 stores their text in a heap.
    """
    if 0 in shape:
        return file.create_dataset(name, shape, dtype=column.dtype)
    options = {} if column.dtype is STRING else {"compression": "gzip", "compression_opts": 1, "shuffle": True}
    most = CHUNK_TOKENS if name.removeprefix("rows/") in OFFSETS else CHUNK_ROWS
    chunks = (min(shape[0], max(most // max(shape[1:], default=1), 1)), *shape[1:])
    return file.create_dataset(name, shape, dtype=column.dtype, chunks=chunks, fillvalue=column.fill, **options)


def write_attributes(file: h5py.File, attributes: dict[str, Any], *, complete: bool) -> None:
    """Write the root attributes: `complete`, and all others as JSON text of any length."""
    file.attrs["complete"] = complete
    for name, value in attributes.items():
        file.attrs[name] = msgspec.json.encode(value, enc_hook=str).decode()


def utf8(text: str) -> bytes:
    """Return text as HDF5 can store it. NUL, which ends a string in HDF5, becomes U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace")


def objects(values: list[bytes]) -> np.ndarray:
    """Return values as an object array [n], in which h5py accepts strings of any length."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
