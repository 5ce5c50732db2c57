"""Merges sorted files of rows into one sorted file, in batches of bounded size (a k-way merge)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from hpcdecode.data.results.checked import checked_offsets
from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.layout import COLUMNS, ERROR_COLUMNS, OFFSETS, RAGGED, ROW_COLUMNS, Extent, FileWriter
from hpcdecode.errors import InvariantViolation, UserError

BATCH_ROWS = 8192
BATCH_ENTRIES = 1 << 20  # values of ragged columns
_HEAD_ROWS = 1 << 15  # sort keys in memory, of all sources together
_SAMPLE_BITS = 20  # of a sort key, which is the line followed by the sample
_MAX_LINES = 1 << 42


class Span(NamedTuple):
    """Rows of a source, from `start` up to and without `stop`."""

    source: int
    start: int
    stop: int


class Batch(NamedTuple):
    """Rows that come next in the merged order.

    Attributes:
        spans: The rows, at most one span a source.
        order: Permutation that sorts the rows of all spans joined, [n] int64.
        keys: Their sort keys in this order, [n] int64.
    """

    spans: list[Span]
    order: np.ndarray
    keys: np.ndarray


def merge(
    paths: Sequence[Path], out: h5py.File, check: Callable[[], None], base: Mapping[str, int] | None = None
) -> int:
    """Write the rows of sorted files to one file, sorted by line and sample, and their errors, sorted by line.

    The memory that this needs does not grow with the number of rows.

    Args:
        paths: Files that are sorted themselves.
        out: The open file to write.
        check: Called after each batch; it may raise to stop the merge.
        base: First offset by the name of the offsets, if `out` is a segment.

    Returns:
        The number of different lines that the rows and errors have.

    Raises:
        OSError: A file cannot be read.
        UserError: A file is not sorted.
        InvariantViolation: A row is missing, or is there twice.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in paths]
        rows = [_RowSource(file) for file in files]
        errors = [_ErrorSource(file) for file in files]
        total = Extent.sum([source.extent for source in rows])
        writer, seen, bad = FileWriter(out, total, base), _Ascending("(line, sample)"), _Ascending("line of an error")
        for batch in _batches(rows):
            seen.add(batch.keys, batch.keys >> _SAMPLE_BITS)
            _copy_rows(rows, batch, writer, total)
            check()
        for batch in _batches(errors):
            bad.add(batch.keys, batch.keys)
            writer.append_errors({name: _gather(errors, name, batch.spans)[batch.order] for name in ERROR_COLUMNS})
            check()
        writer.check_full()
        return seen.lines + bad.lines


def _open(path: Path) -> h5py.File:
    try:
        return open_segment(path)
    except FileNotFoundError as e:
        raise FileNotFoundError(e.errno, f"{path.name} is missing") from e


class _Ascending:
    """Counts the lines of rows in their order, and checks that no row is there twice.

    Args:
        what: Name of the sort key, for the error message.

    Attributes:
        lines: Number of different lines so far.
    """

    def __init__(self, what: str) -> None:
        self._what, self._key, self._line, self.lines = what, -1, -1, 0

    def add(self, keys: np.ndarray, lines: np.ndarray) -> None:
        """Add the next rows, of which there is at least one.

        Args:
            keys: Their sort keys, [n] int64.
            lines: Their lines, [n] int64.

        Raises:
            InvariantViolation: The keys do not ascend.
        """
        wrong = np.flatnonzero(np.diff(keys, prepend=self._key) <= 0)
        if len(wrong):
            line = int(lines[wrong[0]])
            raise InvariantViolation("no row is in the results twice", f"{self._what} of line {line} came before")
        self.lines += int(np.count_nonzero(np.diff(lines, prepend=self._line)))
        self._key, self._line = int(keys[-1]), int(lines[-1])


class _Source:
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


class _ErrorSource(_Source):
    def __init__(self, file: h5py.File) -> None:
        super().__init__(file["errors"])


class _RowSource(_Source):
    def __init__(self, file: h5py.File) -> None:
        super().__init__(file["rows"])
        self.extent = Extent.of(file)
        self.offsets = {name: self.group[name] for name in RAGGED if name in self.group}
        self.bases = {name: int(offsets[0]) for name, offsets in self.offsets.items()}
        widths = {name: [w for n, w in self.extent.widths.items() if OFFSETS.get(n) == name] for name in RAGGED}
        self.values_per_entry = {name: sum(w) for name, w in widths.items()}

    def keys(self, start: int, stop: int) -> np.ndarray:
        lines, samples = self.group["line"][start:stop].astype(np.int64), self.group["sample"][start:stop]
        if lines.min() < 0 or lines.max() >= _MAX_LINES or samples.min() < 0 or samples.max() >= 1 << _SAMPLE_BITS:
            where = f"{self.group.file.filename}: {self.group.name}"
            raise UserError(f"{where}: expected lines and samples from 0 on, got others; the file is damaged")
        keys: np.ndarray = (lines << _SAMPLE_BITS) + samples
        return keys

    def sizes(self, start: int, stop: int) -> np.ndarray:
        sizes = np.zeros(stop - start, np.int64)
        for name in RAGGED:
            sizes += self.counts(name, start, stop) * self.values_per_entry[name]
        return sizes

    def counts(self, offsets: str, start: int, stop: int) -> np.ndarray:
        """Return the number of entries of each row, [stop - start] int64, by offsets of this name."""
        if offsets not in self.offsets:
            return np.zeros(stop - start, np.int64)
        ends = self.offsets[offsets][start : stop + 1].astype(np.int64)
        return np.diff(checked_offsets(ends, self.group.file.filename))

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


def _batches(sources: Sequence[_Source]) -> Iterator[Batch]:
    """Yield the rows of all sources in their merged order."""
    head_rows = max(256, _HEAD_ROWS // max(1, len(sources)))
    while sources:
        for source in sources:
            source.fill(head_rows)
        counts = _next_counts(sources)
        if not counts.any():
            return
        heads = enumerate(zip(sources, counts.tolist(), strict=True))
        spans = [Span(i, source.merged, source.merged + n) for i, (source, n) in heads if n]
        keys = np.concatenate([sources[i].head_keys[: stop - start] for i, start, stop in spans])
        order = np.argsort(keys, kind="stable")
        yield Batch(spans, order, keys[order])
        for i, start, stop in spans:
            sources[i].advance(stop - start)


def _next_counts(sources: Sequence[_Source]) -> np.ndarray:
    """Return how many rows of each source the next batch has, [sources] int64."""
    last_keys = [s.head_keys[-1] for s in sources if s.has_more()]  # beyond the least, unread rows may come first
    heads = [
        int(np.searchsorted(s.head_keys, min(last_keys), "right")) if last_keys else len(s.head_keys) for s in sources
    ]
    keys = np.concatenate([s.head_keys[:n] for s, n in zip(sources, heads, strict=True)])
    sizes = np.concatenate([s.head_sizes[:n] for s, n in zip(sources, heads, strict=True)])
    owners = np.repeat(np.arange(len(sources)), heads)
    order = np.argsort(keys, kind="stable")[:BATCH_ROWS]
    fitting = int(np.searchsorted(np.cumsum(sizes[order]), BATCH_ENTRIES, "right"))
    return np.bincount(owners[order[: max(1, fitting)]], minlength=len(sources))


def _copy_rows(sources: Sequence[_RowSource], batch: Batch, writer: FileWriter, total: Extent) -> None:
    """Write a batch of rows to a file of the extent `total`."""
    spans, order = batch.spans, batch.order
    rows = {name: _gather(sources, name, spans)[order] for name in ROW_COLUMNS if name in total.widths}
    lengths: dict[str, np.ndarray] = {}
    entries: dict[str, np.ndarray] = {}
    for offsets, columns in RAGGED.items():
        counts = np.concatenate([sources[i].counts(offsets, start, stop) for i, start, stop in spans])
        starts = np.cumsum(counts) - counts
        counts = lengths[offsets] = counts[order]
        shift = starts[order] - (np.cumsum(counts) - counts)
        picked = np.repeat(shift, counts) + np.arange(int(counts.sum()))
        for name in (n for n in columns if n in total.widths):
            held = [sources[i].entries(name, start, stop, total.widths[name]) for i, start, stop in spans]
            entries[name] = np.concatenate(held)[picked]
    writer.append_rows(rows, lengths, entries)


def _gather(sources: Sequence[_Source], name: str, spans: list[Span]) -> np.ndarray:
    """Return the values of a column in all spans joined."""
    groups = [(sources[i].group, start, stop) for i, start, stop in spans]
    return np.concatenate(
        [
            group[name][start:stop] if name in group else np.full(stop - start, COLUMNS[name].fill)
            for group, start, stop in groups
        ]
    )
