"""Files to merge: reads the sort keys of their rows and errors ahead, and the values of rows."""

from __future__ import annotations

import os

import h5py
import numpy as np

from hpcdecode.data.results.checked import checked_offsets
from hpcdecode.data.results.inputs import packed_rows, split
from hpcdecode.data.results.layout import COLUMNS, INPUTS, OFFSETS, PACKED, RAGGED, Extent
from hpcdecode.errors import UserError

BATCH_ENTRIES = 1 << 20  # values of ragged columns
SAMPLE_BITS = 20  # of a sort key, which is the line followed by the sample
_MAX_LINES = 1 << 42


class Source:
    """The rows or the errors of a file to merge, of which a head is in memory.

    Attributes:
        group: Group of the columns.
        length: Number of rows.
        merged: Number of rows that are merged already.
        last_key: Sort key of the last row of the head.
        head_keys: Sort keys of the rows of the head, which begins at the row `merged`, [n] int64.
        head_sizes: Number of values that each of them has in ragged columns, [n] int64.
    """

    def __init__(self, group: h5py.Group) -> None:
        self.group = group
        self.length = len(group["line"])
        self.merged = self.last_key = 0
        self.head_keys = self.head_sizes = np.empty(0, np.int64)

    def fill(self, count: int) -> None:
        """Read a head of `count` rows, unless there is one."""
        if len(self.head_keys) == 0 and self.merged < self.length:
            stop = min(self.merged + count, self.length)
            self.head_keys = self._sorted(self.keys(self.merged, stop))
            self.head_sizes = self.sizes(self.merged, stop)

    def _sorted(self, keys: np.ndarray) -> np.ndarray:
        if keys[0] < self.last_key or (np.diff(keys) < 0).any():
            where = f"{self.group.file.filename}: {self.group.name}"
            raise UserError(f"{where}: expected rows sorted by line and sample, got others; the file is damaged")
        self.last_key = int(keys[-1])
        return keys

    def advance(self, count: int) -> None:
        """Remove the first `count` rows of the head, which are merged now."""
        self.merged += count
        self.head_keys, self.head_sizes = self.head_keys[count:], self.head_sizes[count:]

    def has_more(self) -> bool:
        """Return whether there are rows after the head."""
        return self.merged + len(self.head_keys) < self.length

    def keys(self, start: int, stop: int) -> np.ndarray:
        """Return the sort keys of rows."""
        lines: np.ndarray = self.group["line"][start:stop]
        return lines

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Return the number of values that each row has in ragged columns."""
        return np.zeros(stop - start, np.int64)


class ErrorSource(Source):
    """The errors of a file to merge."""

    def __init__(self, file: h5py.File) -> None:
        super().__init__(file["errors"])
        self._size = os.path.getsize(file.filename) // (len(file["rows/line"]) + self.length) if self.length else 0

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Return the number of bytes of each error, on average."""
        return np.full(stop - start, self._size)


class RowSource(Source):
    """The rows of a file to merge.

    Args:
        file: The file.
        pack: Whether the input columns of a final file are to be packed, so that their size has to be known.
    """

    def __init__(self, file: h5py.File, *, pack: bool) -> None:
        super().__init__(file["rows"])
        self.extent, self._file = Extent.of(file), file
        self._final = INPUTS not in self.group and self.extent.inputs.any
        self._average = os.path.getsize(file.filename) // self.length if self._final and self.length else 0
        if self._final and pack:
            starts = range(0, self.length, max(1, BATCH_ENTRIES // max(1, self._average)))
            blocks = (packed_rows(file, self.extent.inputs, slice(start, start + starts.step)) for start in starts)
            self.extent.entries[INPUTS] = sum(len(row) for block in blocks for row in block)
            self.extent.widths[PACKED] = 1
        self.offsets = {name: self.group[name] for name in RAGGED if name in self.group}
        self.bases = {name: int(offsets[0]) for name, offsets in self.offsets.items()}
        widths = {name: [w for n, w in self.extent.widths.items() if OFFSETS.get(n) == name] for name in RAGGED}
        self.values_per_entry = {name: sum(w) for name, w in widths.items()}

    def keys(self, start: int, stop: int) -> np.ndarray:
        """Return the sort keys of rows: line and sample."""
        lines, samples = self.group["line"][start:stop].astype(np.int64), self.group["sample"][start:stop]
        if lines.min() < 0 or lines.max() >= _MAX_LINES or samples.min() < 0 or samples.max() >= 1 << SAMPLE_BITS:
            where = f"{self.group.file.filename}: {self.group.name}"
            raise UserError(f"{where}: expected lines and samples from 0 on, got others; the file is damaged")
        keys: np.ndarray = (lines << SAMPLE_BITS) + samples
        return keys

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Return the number of values of each row in ragged columns, and about the bytes of its input columns."""
        sizes = np.full(stop - start, self._average)
        for name in RAGGED:
            sizes += self.counts(name, start, stop) * self.values_per_entry[name]
        return sizes

    def counts(self, offsets: str, start: int, stop: int) -> np.ndarray:
        """Return the number of entries of each row, [stop - start] int64, by offsets of this name."""
        if offsets not in self.offsets:
            return np.zeros(stop - start, np.int64)
        ends = self.offsets[offsets][start : stop + 1].astype(np.int64)
        return np.diff(checked_offsets(ends, self.group.file.filename))

    def packed(self, start: int, stop: int) -> list[bytes]:
        """Return the packed input columns of rows."""
        if self._final:
            return packed_rows(self._file, self.extent.inputs, slice(start, stop))
        if INPUTS not in self.offsets:
            return [b""] * (stop - start)
        return split(self.entries(PACKED, start, stop, 1), self.counts(INPUTS, start, stop))

    def entries(self, name: str, start: int, stop: int, width: int) -> np.ndarray:
        """Return the entries of rows in a column, [entries] or [entries, width]."""
        offsets, column = OFFSETS[name], COLUMNS[name]
        first, last = (
            int(self.offsets[offsets][i]) - self.bases[offsets] if offsets in self.offsets else 0 for i in (start, stop)
        )
        values = np.full((last - first, width) if column.wide else last - first, column.fill or 0, column.dtype)
        if name in self.extent.widths and values.size:
            held = self.group[name][first:last]
            place = (slice(None), *map(slice, held.shape[1:]))
            values[place] = held
        return values
