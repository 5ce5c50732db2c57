"""The HDF5 layout of results files: the datasets that they have.

    /rows/*             [n]         one entry per finished sequence
    /rows/token_ids     [total]     row i has the entries token_offsets[i]:token_offsets[i+1]
    /rows/top_logprobs  [total, k]  values of the k most likely tokens at each position
    /errors/*           [m]         one entry per row that could not be used

A final file, a segment (the rows of one commit) and the index (virtual datasets over segments) have the same datasets.
The offsets of a segment begin at its `base`, the number of entries in all segments before it, instead of 0. Therefore
the index can join the offsets of segments unchanged. A column with a `fill` exists only if some row has values.
Input columns are packed in `input_json` of segments; a final file has them in /input (see inputs.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import h5py
import msgspec
import numpy as np

from hpcdecode.data.results.inputs import InputColumns
from hpcdecode.data.results.strings import STRING

FINISH_REASONS = {"stop": 0, "length": 1}
FINISH = h5py.enum_dtype(FINISH_REASONS, basetype="u1")
PARSED, _NONE = ("reasoning", "content", "tool_calls"), float("nan")  # parts of the text; calls are JSON text
ADAPTER = "adapter"  # its name, of a row that chose one
NOT_OWN = (*PARSED, ADAPTER)  # of files that have them; in others input columns may have these names


class Column(NamedTuple):
    """The type of a dataset.

    Attributes:
        dtype: Type of its entries.
        fill: Value of entries that the row did not ask for; None if every row has a value.
        wide: The shape is [entries, k] instead of [entries].
    """

    dtype: np.dtype[Any]
    fill: float | bytes | None = None
    wide: bool = False


ROW_COLUMNS: dict[str, Column] = {
    "line": Column(np.dtype("i8")),
    "id": Column(STRING),
    "sample": Column(np.dtype("i4")),
    "text": Column(STRING),
    "finish_reason": Column(FINISH),
    "prompt_tokens": Column(np.dtype("i4")),
    **dict.fromkeys(("queued_at", "first_token_at", "finished_at"), Column(np.dtype("f8"))),
    "cumulative_logprob": Column(np.dtype("f8"), _NONE),
    **dict.fromkeys(PARSED, Column(STRING, b"")),
    "perplexity": Column(np.dtype("f8"), _NONE),
    **dict.fromkeys(("is_greedy", "is_best"), Column(np.dtype("?"), False)),
    ADAPTER: Column(STRING, b""),
}
TOKENS, PROMPTS, INPUTS = "token_offsets", "prompt_offsets", "input_offsets"
PACKED = "input_json"  # packed rows, in segments and the index only
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
    INPUTS: {PACKED: Column(np.dtype("u1"), 0)},
}
OFFSETS = {name: offsets for offsets, columns in RAGGED.items() for name in columns}
COLUMNS = ROW_COLUMNS | {name: column for columns in RAGGED.values() for name, column in columns.items()}
ERROR_COLUMNS: dict[str, Column] = {
    "line": Column(np.dtype("i8")),
    "id": Column(STRING),
    "reason": Column(STRING),
    "input": Column(STRING, b""),  # the row's columns as a JSON object
}
OFFSETS_COLUMN = Column(np.dtype("i8"))

_OWN = {*COLUMNS, *RAGGED, "prompt", "input", "reason"} - set(NOT_OWN)
CHUNK_ROWS, CHUNK_TOKENS = 8192, 65536


class Extent(msgspec.Struct, frozen=True):
    """The size of a results file.

    Attributes:
        rows: Number of finished sequences.
        errors: Number of rows that could not be used.
        entries: Number of entries by the name of their offsets.
        widths: Second dimension of each column in the file; 1 if it is not wide.
        inputs: The input columns of its rows.
        error_columns: Names of the columns of errors in the file.
    """

    rows: int
    errors: int
    entries: dict[str, int]
    widths: dict[str, int]
    inputs: InputColumns
    error_columns: tuple[str, ...]

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
            inputs=InputColumns.of(file),
            error_columns=tuple(name for name in ERROR_COLUMNS if name in file["errors"]),
        )

    @staticmethod
    def sum(extents: list[Extent]) -> Extent:
        """Return the extent of a file with the rows of all files of these extents."""
        widths: dict[str, int] = {name: 1 for name, column in COLUMNS.items() if column.fill is None}
        for extent in extents:
            for name, width in extent.widths.items():
                widths[name] = max(widths.get(name, 0), width)
        entries = {name: sum(e.entries[name] for e in extents) for name in RAGGED}
        return Extent(
            rows=sum(e.rows for e in extents),
            errors=sum(e.errors for e in extents),
            entries=entries,
            widths=widths,
            inputs=InputColumns.sum([e.inputs for e in extents]),
            error_columns=error_columns(name for e in extents for name in e.error_columns),
        )

    def length(self, name: str) -> int:
        """Return the length of a column, whether or not it is in the file."""
        return self.entries[OFFSETS[name]] if name in OFFSETS else self.rows

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a column in the file."""
        return (self.length(name), self.widths[name]) if COLUMNS[name].wide else (self.length(name),)


def error_columns(held: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of errors that a file has, if its rows have values in the columns `held`."""
    names = set(held)
    return tuple(name for name, column in ERROR_COLUMNS.items() if column.fill is None or name in names)


class Table(msgspec.Struct):
    """Columns in memory, without those that no row has values for. Strings are bytes objects.

    Attributes:
        rows: Arrays [n] by column.
        lengths: Arrays [n] int64 by the name of their offsets: the number of entries of each row.
        entries: Arrays [sum of lengths] or [sum of lengths, k] by column.
        errors: Arrays [m] by column of the errors.
        inputs: The input columns of the rows.
    """

    rows: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    entries: dict[str, np.ndarray]
    errors: dict[str, np.ndarray]
    inputs: InputColumns

    def extent(self) -> Extent:
        """Return the extent of a file with these columns."""
        columns = self.rows | self.entries
        return Extent(
            rows=len(self.rows["line"]),
            errors=len(self.errors["line"]),
            entries={name: int(lengths.sum()) for name, lengths in self.lengths.items()},
            widths={name: values.shape[1] if COLUMNS[name].wide else 1 for name, values in columns.items()},
            inputs=self.inputs,
            error_columns=error_columns(self.errors),
        )


def shown_name(name: str, parsed: Container[str] = ()) -> str:
    """Return the name under which rows and exports show an input column of a file that has the columns `parsed`.

    It has `input.` before it if it is the name of a column of the program, or begins so itself.
    """
    own = name in _OWN or name in parsed or name.startswith("input.")
    return "input." + name if own or not name else name


def create(file: h5py.File, name: str, shape: tuple[int, ...], column: Column) -> h5py.Dataset:
    """Create a dataset and return it.

    Numbers are chunked and compressed. Strings are only chunked, since HDF5 stores their text in a heap.
    """
    if 0 in shape:
        return file.create_dataset(name, shape, dtype=column.dtype)
    options = {} if column.dtype is STRING else {"compression": "gzip", "compression_opts": 1, "shuffle": True}
    most = CHUNK_TOKENS if name.removeprefix("rows/") in OFFSETS else CHUNK_ROWS
    chunks = (min(shape[0], max(most // max(shape[1:], default=1), 1)), *shape[1:])
    return file.create_dataset(name, shape, dtype=column.dtype, chunks=chunks, fillvalue=fill_of(column), **options)


def fill_of(column: Column) -> float | None:
    """Return what HDF5 shows where nothing was written; None for its own default, an empty text."""
    return None if isinstance(column.fill, bytes) else column.fill


def write_attributes(file: h5py.File, attributes: dict[str, Any], *, complete: bool) -> None:
    """Write the root attributes: `complete`, and all others as JSON text of any length."""
    file.attrs["complete"] = complete
    for name, value in attributes.items():
        file.attrs[name] = msgspec.json.encode(value, enc_hook=str).decode()
