"""The HDF5 layout of results: which datasets there are, and how a file of them is written.

    /rows/*           [n]      one entry per finished sequence
    /rows/token_ids   [total]  row i has token_offsets[i]:token_offsets[i+1]
    /errors/*         [m]      one entry per line that could not be used

The same names hold in the final file, in a segment (a file of the rows of one commit) and in the index (virtual
datasets over segments). Only the token_offsets of a segment begin at its `base` instead of 0: the tokens of all
segments before it, so that the index joins them as they are.
"""

from __future__ import annotations

from typing import Any

import h5py
import msgspec
import numpy as np

STRING = h5py.string_dtype("utf-8")
FINISH_REASONS = {"stop": 0, "length": 1}
FINISH = h5py.enum_dtype(FINISH_REASONS, basetype="u1")

ROW_COLUMNS: dict[str, Any] = {
    "line": np.dtype("i8"),
    "id": STRING,
    "sample": np.dtype("i4"),
    "text": STRING,
    "finish_reason": FINISH,
    "prompt_tokens": np.dtype("i4"),
    "queued_at": np.dtype("f8"),
    "first_token_at": np.dtype("f8"),
    "finished_at": np.dtype("f8"),
}
TOKEN_COLUMNS: dict[str, Any] = {"token_ids": np.dtype("i4")}
ERROR_COLUMNS: dict[str, Any] = {"line": np.dtype("i8"), "id": STRING, "reason": STRING}
TOKEN_OFFSETS = "rows/token_offsets"

CHUNK_ROWS = 8192
CHUNK_TOKENS = 65536


class Table(msgspec.Struct):
    """Columns in memory. rows and errors: [n] and [m] arrays by name, bytes objects for strings."""

    rows: dict[str, np.ndarray]
    lengths: np.ndarray  # [n] int64, generated tokens of each row
    tokens: dict[str, np.ndarray]  # [sum of lengths]
    errors: dict[str, np.ndarray]


class FileWriter:
    """Fills an open file with `n` rows, `total` tokens and `m` errors, given in their final order by stretches."""

    def __init__(self, file: h5py.File, n: int, total: int, m: int, base: int = 0) -> None:
        self._rows = {name: create(file, f"rows/{name}", n, kind, CHUNK_ROWS) for name, kind in ROW_COLUMNS.items()}
        self._tokens = {
            name: create(file, f"rows/{name}", total, kind, CHUNK_TOKENS) for name, kind in TOKEN_COLUMNS.items()
        }
        self._errors = {
            name: create(file, f"errors/{name}", m, kind, CHUNK_ROWS) for name, kind in ERROR_COLUMNS.items()
        }
        self._offsets = create(file, TOKEN_OFFSETS, n + 1, np.dtype("i8"), CHUNK_ROWS)
        self._offsets[0] = base
        self._base, self._row, self._token, self._error = base, 0, 0, 0

    def append_rows(self, rows: dict[str, np.ndarray], lengths: np.ndarray, tokens: dict[str, np.ndarray]) -> None:
        n, total = len(lengths), int(lengths.sum())
        if n == 0:
            return
        for name, dataset in self._rows.items():
            dataset[self._row : self._row + n] = rows[name]
        ends = self._base + self._token + np.cumsum(lengths, dtype=np.int64)
        self._offsets[self._row + 1 : self._row + 1 + n] = ends
        if total:
            for name, dataset in self._tokens.items():
                dataset[self._token : self._token + total] = tokens[name]
        self._row += n
        self._token += total

    def append_errors(self, errors: dict[str, np.ndarray]) -> None:
        m = len(errors["line"])
        if m == 0:
            return
        for name, dataset in self._errors.items():
            dataset[self._error : self._error + m] = errors[name]
        self._error += m


def create(file: h5py.File, name: str, length: int, kind: Any, chunk: int) -> h5py.Dataset:
    """An empty dataset [length]: numbers chunked and compressed, strings chunked (their text lies in the heap)."""
    if length == 0:
        return file.create_dataset(name, (0,), dtype=kind)
    options = {} if kind is STRING else {"compression": "gzip", "compression_opts": 1, "shuffle": True}
    return file.create_dataset(name, (length,), dtype=kind, chunks=(min(length, chunk),), **options)


def write_attributes(file: h5py.File, attributes: dict[str, Any], *, complete: bool) -> None:
    """Root attributes: `complete`, and everything else as a JSON string of any length."""
    file.attrs["complete"] = complete
    for name, value in attributes.items():
        file.attrs[name] = msgspec.json.encode(value, enc_hook=str).decode()


def utf8(text: str) -> bytes:
    """Text as HDF5 can store it: NUL, which ends its strings, becomes U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace")


def objects(values: list[bytes]) -> np.ndarray:
    """[n] object array, the form in which h5py takes strings of any length."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
