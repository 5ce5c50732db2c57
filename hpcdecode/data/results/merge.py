"""Sorted segments into one sorted file, a bounded stretch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import h5py
import numpy as np

from hpcdecode.data.results.checked import ends_checked
from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.layout import COLUMNS, ERROR_COLUMNS, OFFSETS, RAGGED, ROW_COLUMNS, Extent, FileWriter
from hpcdecode.errors import InvariantViolation, UserError

STRETCH_ROWS = 8192
STRETCH_TOKENS = 1 << 20  # numbers beside those of the row itself
_HEAD_ROWS = 1 << 15  # keys held in memory, all sources together
_SAMPLE_BITS = 20
_MOST_LINES = 1 << 42

Span = tuple[int, int, int]  # source, first row, row after the last


def merge(
    paths: Sequence[Path], out: h5py.File, check: Callable[[], None], base: Mapping[str, int] | None = None
) -> int:
    """Write the rows of all segments `paths` to `out` by (line, sample), their errors by line.

    Memory does not grow with the number of rows.

    Args:
        paths: files of which each is sorted already.
        check: called after each stretch; it may raise to stop the merge.
        base: where the offsets of `out` begin if it is a segment.

    Returns:
        How many different lines the rows and errors have.

    Raises:
        OSError, UserError: a segment cannot be read, or is not sorted.
        InvariantViolation: a row was lost, or came twice.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in paths]
        rows = [_RowSource(file) for file in files]
        errors = [_ErrorSource(file) for file in files]
        total = Extent.sum([source.extent for source in rows])
        writer, seen, bad = FileWriter(out, total, base), _Ascending("(line, sample)"), _Ascending("line of an error")
        for spans, order, keys in _stretches(rows):
            seen.take(keys, keys >> _SAMPLE_BITS)
            _copy_rows(rows, spans, order, writer, total)
            check()
        for spans, order, keys in _stretches(errors):
            bad.take(keys, keys)
            columns = {name: _gather(errors, name, spans)[order] for name in ERROR_COLUMNS}
            writer.append_errors(columns)
            check()
        writer.check_full()
        return seen.lines + bad.lines


def _open(path: Path) -> h5py.File:
    try:
        return open_segment(path)
    except FileNotFoundError as e:
        raise FileNotFoundError(e.errno, f"{path.name} is missing") from e


class _Ascending:
    """Counts the lines of sorted keys, and holds that no key comes twice."""

    def __init__(self, what: str) -> None:
        self._what, self._key, self._line, self.lines = what, -1, -1, 0

    def take(self, keys: np.ndarray, lines: np.ndarray) -> None:
        """keys, lines: int64 [n], n >= 1, of the rows that follow. Raises InvariantViolation."""
        wrong = np.flatnonzero(np.diff(keys, prepend=self._key) <= 0)
        if len(wrong):
            line = int(lines[wrong[0]])
            raise InvariantViolation("no row is in the results twice", f"{self._what} of line {line} came before")
        self.lines += int(np.count_nonzero(np.diff(lines, prepend=self._line)))
        self._key, self._line = int(keys[-1]), int(lines[-1])


class _Source:
    """One table of one segment: its columns, its sort keys, and how far it is merged."""

    def __init__(self, group: h5py.Group) -> None:
        self.group = group
        self.length = len(group["line"])
        self.merged = 0  # rows already written
        self.last_key = 0  # of those at hand
        self.head_keys = self.head_lengths = np.empty(0, np.int64)  # of the rows from `merged` on

    def fill(self, count: int) -> None:
        """Have the keys and token counts of the next `count` rows at hand, unless some are left."""
        if len(self.head_keys) == 0 and self.merged < self.length:
            stop = min(self.merged + count, self.length)
            self.head_keys = self._sorted(self.keys(self.merged, stop))
            self.head_lengths = self.lengths(self.merged, stop)

    def _sorted(self, keys: np.ndarray) -> np.ndarray:
        if keys[0] < self.last_key or (np.diff(keys) < 0).any():
            where = f"{self.group.file.filename}: {self.group.name}"
            raise UserError(f"{where}: expected rows sorted by line and sample, got others; the file is damaged")
        self.last_key = int(keys[-1])
        return keys

    def advance(self, count: int) -> None:
        self.merged += count
        self.head_keys, self.head_lengths = self.head_keys[count:], self.head_lengths[count:]

    def unseen(self) -> bool:
        """True where rows follow whose keys are not at hand."""
        return self.merged + len(self.head_keys) < self.length

    def keys(self, start: int, stop: int) -> np.ndarray:
        return self.group["line"][start:stop]

    def lengths(self, start: int, stop: int) -> np.ndarray:
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
        self.weights = {name: sum(w) for name, w in widths.items()}

    def keys(self, start: int, stop: int) -> np.ndarray:
        lines, samples = self.group["line"][start:stop].astype(np.int64), self.group["sample"][start:stop]
        if lines.min() < 0 or lines.max() >= _MOST_LINES or samples.min() < 0 or samples.max() >= 1 << _SAMPLE_BITS:
            where = f"{self.group.file.filename}: {self.group.name}"
            raise UserError(f"{where}: expected lines and samples from 0 on, got others; the file is damaged")
        return (lines << _SAMPLE_BITS) + samples

    def lengths(self, start: int, stop: int) -> np.ndarray:
        return sum(self.counts(name, start, stop) * self.weights[name] for name in RAGGED)

    def counts(self, offsets: str, start: int, stop: int) -> np.ndarray:
        """Entries of each row."""
        if offsets not in self.offsets:
            return np.zeros(stop - start, np.int64)
        ends = self.offsets[offsets][start : stop + 1].astype(np.int64)
        return np.diff(ends_checked(ends, self.group.file.filename))

    def entries(self, name: str, start: int, stop: int, width: int) -> np.ndarray:
        """A column's entries of rows, [entries] or [entries, width]."""
        offsets, column = OFFSETS[name], COLUMNS[name]
        first, last = (
            int(self.offsets[offsets][i]) - self.bases[offsets] if offsets in self.offsets else 0 for i in (start, stop)
        )
        values = np.full((last - first, width) if column.wide else last - first, column.fill or 0, column.dtype)
        if name in self.extent.widths and values.size:
            held = self.group[name][first:last]
            values[(slice(None), *map(slice, held.shape[1:]))] = held
        return values


def _stretches(sources: Sequence[_Source]) -> Iterator[tuple[list[Span], np.ndarray, np.ndarray]]:
    """Cut the merged order into stretches: spans of sources, the permutation that sorts them joined, sorted keys."""
    head_rows = max(256, _HEAD_ROWS // max(1, len(sources)))
    while sources:
        for source in sources:
            source.fill(head_rows)
        takes = _next_counts(sources)
        if not takes.any():
            return
        spans = [(i, s.merged, s.merged + int(n)) for i, (s, n) in enumerate(zip(sources, takes, strict=True)) if n]
        keys = np.concatenate([sources[i].head_keys[: b - a] for i, a, b in spans])
        order = np.argsort(keys, kind="stable")
        yield spans, order, keys[order]
        for i, a, b in spans:
            sources[i].advance(b - a)


def _next_counts(sources: Sequence[_Source]) -> np.ndarray:
    """[sources] int64: how many rows of each head come next, within the limits of a stretch."""
    cuts = [s.head_keys[-1] for s in sources if s.unseen()]  # beyond these, unseen rows may come first
    heads = [np.searchsorted(s.head_keys, min(cuts), "right") if cuts else len(s.head_keys) for s in sources]
    keys = np.concatenate([s.head_keys[:n] for s, n in zip(sources, heads, strict=True)])
    lengths = np.concatenate([s.head_lengths[:n] for s, n in zip(sources, heads, strict=True)])
    owners = np.repeat(np.arange(len(sources)), heads)
    order = np.argsort(keys, kind="stable")[:STRETCH_ROWS]
    fitting = int(np.searchsorted(np.cumsum(lengths[order]), STRETCH_TOKENS, "right"))
    return np.bincount(owners[order[: max(1, fitting)]], minlength=len(sources))


def _copy_rows(
    sources: Sequence[_RowSource], spans: list[Span], order: np.ndarray, writer: FileWriter, total: Extent
) -> None:
    rows = {name: _gather(sources, name, spans)[order] for name in ROW_COLUMNS if name in total.widths}
    lengths, entries = {}, {}
    for offsets, columns in RAGGED.items():
        counts = np.concatenate([sources[i].counts(offsets, a, b) for i, a, b in spans])
        starts = np.cumsum(counts) - counts
        counts = lengths[offsets] = counts[order]
        shift = starts[order] - (np.cumsum(counts) - counts)
        picked = np.repeat(shift, counts) + np.arange(int(counts.sum()))
        for name in (n for n in columns if n in total.widths):
            made = [sources[i].entries(name, a, b, total.widths[name]) for i, a, b in spans]
            entries[name] = np.concatenate(made)[picked]
    writer.append_rows(rows, lengths, entries)


def _gather(sources: Sequence[_Source], name: str, spans: list[Span]) -> np.ndarray:
    return np.concatenate(
        [
            sources[i].group[name][a:b] if name in sources[i].group else np.full(b - a, COLUMNS[name].fill)
            for i, a, b in spans
        ]
    )
