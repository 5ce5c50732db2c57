"""Fills results files, in the layout of `layout.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from hpcdecode.data.results.inputs import InputWriter, split
from hpcdecode.data.results.layout import (
    COLUMNS,
    ERROR_COLUMNS,
    INPUTS,
    OFFSETS,
    OFFSETS_COLUMN,
    PACKED,
    RAGGED,
    TOKENS,
    Column,
    Extent,
    create,
)
from hpcdecode.errors import InvariantViolation


class FileWriter:
    """Fills a new file with rows, which come in batches in their final order.

    Args:
        file: The open file.
        extent: The size that it will have.
        base: First offset by the name of the offsets, for a segment. None for a final file, which has offsets only for
            columns with entries, and input columns with datasets of their own.
    """

    def __init__(self, file: h5py.File, extent: Extent, base: Mapping[str, int] | None = None) -> None:
        final = base is None
        self._columns = {
            name: create(file, f"rows/{name}", extent.shape(name), COLUMNS[name])
            for name in extent.widths
            if not (final and name == PACKED)
        }
        self._errors = {
            name: create(file, f"errors/{name}", (extent.errors,), ERROR_COLUMNS[name]) for name in extent.error_columns
        }
        self._inputs = InputWriter(file, extent.inputs, _create_input) if final else None
        if not final:
            extent.inputs.write_to(file)
        kept = [name for name in RAGGED if not final or (extent.entries[name] and name != INPUTS) or name == TOKENS]
        self._offsets = {name: create(file, f"rows/{name}", (extent.rows + 1,), OFFSETS_COLUMN) for name in kept}
        self._base = {name: base[name] if base else 0 for name in RAGGED}
        for name, offsets in self._offsets.items():
            offsets[0] = self._base[name]
        self._extent = extent
        self._row = self._error = 0  # written so far
        self._entry = dict.fromkeys(RAGGED, 0)  # written so far, by the name of their offsets

    def append_rows(
        self,
        rows: dict[str, np.ndarray],
        lengths: dict[str, np.ndarray],
        entries: dict[str, np.ndarray],
    ) -> None:
        """Append a batch of rows; the arguments are those of a `Table`."""
        n = len(rows["line"])
        if n == 0:
            return
        for name, values in rows.items():
            self._columns[name][self._row : self._row + n] = values
        if self._inputs is not None:
            self._inputs.append(self._row, split(entries.get(PACKED), lengths[INPUTS]))
        for name, values in entries.items():
            start = self._entry[OFFSETS[name]]
            if values.size and name in self._columns:
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
        entries = self._entry if self._inputs is None else self._entry | {INPUTS: extent.entries[INPUTS]}
        written = (self._row, self._error, entries)
        if written != (extent.rows, extent.errors, extent.entries):
            raise InvariantViolation(
                "a merge writes every row once",
                f"expected rows, errors and tokens {(extent.rows, extent.errors, extent.entries)}, got {written}",
            )


def _create_input(file: h5py.File, name: str, rows: int, dtype: Any) -> h5py.Dataset:
    return create(file, name, (rows,), Column(dtype))
