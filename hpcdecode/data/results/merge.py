"""Merges sorted files of rows into one sorted file, in batches of bounded size (a k-way merge)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.file_writer import FileWriter
from hpcdecode.data.results.layout import (
    COLUMNS,
    ERROR_COLUMNS,
    INPUTS,
    PACKED,
    RAGGED,
    ROW_COLUMNS,
    Extent,
)
from hpcdecode.data.results.sources import BATCH_ENTRIES, SAMPLE_BITS, ErrorSource, RowSource, Source
from hpcdecode.errors import InvariantViolation, UserError

BATCH_ROWS = 8192
_HEAD_ROWS = 1 << 15  # sort keys in memory, of all sources together


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
        rows = [RowSource(file, pack=base is not None) for file in files]
        errors = [ErrorSource(file) for file in files]
        total = Extent.sum([source.extent for source in rows])
        writer, seen, bad = FileWriter(out, total, base), _Ascending("(line, sample)"), _Ascending("line of an error")
        for batch in _batches(rows):
            seen.add(batch.keys, batch.keys >> SAMPLE_BITS)
            _copy_rows(rows, batch, writer, total)
            check()
        for batch in _batches(errors):
            bad.add(batch.keys, batch.keys)
            names = total.error_columns
            writer.append_errors({name: _gather(errors, name, batch.spans)[batch.order] for name in names})
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


def _batches(sources: Sequence[Source]) -> Iterator[Batch]:
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


def _next_counts(sources: Sequence[Source]) -> np.ndarray:
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


def _copy_rows(sources: Sequence[RowSource], batch: Batch, writer: FileWriter, total: Extent) -> None:
    """Write a batch of rows to a file of the extent `total`."""
    spans, order = batch.spans, batch.order
    rows = {name: _gather(sources, name, spans)[order] for name in ROW_COLUMNS if name in total.widths}
    lengths: dict[str, np.ndarray] = {}
    entries: dict[str, np.ndarray] = {}
    packed = [row for i, start, stop in spans for row in sources[i].packed(start, stop)]
    lengths[INPUTS] = np.array([len(packed[i]) for i in order], np.int64)
    if lengths[INPUTS].any():
        entries[PACKED] = np.frombuffer(b"".join(packed[i] for i in order), np.uint8)
    for offsets, columns in RAGGED.items():
        if offsets == INPUTS:
            continue
        counts = np.concatenate([sources[i].counts(offsets, start, stop) for i, start, stop in spans])
        starts = np.cumsum(counts) - counts
        counts = lengths[offsets] = counts[order]
        shift = starts[order] - (np.cumsum(counts) - counts)
        picked = np.repeat(shift, counts) + np.arange(int(counts.sum()))
        for name in (n for n in columns if n in total.widths):
            held = [sources[i].entries(name, start, stop, total.widths[name]) for i, start, stop in spans]
            entries[name] = np.concatenate(held)[picked]
    try:
        writer.append_rows(rows, lengths, entries)
    except (ValueError, TypeError, OverflowError) as e:  # packed columns of others than those that the file lists
        names = ", ".join(sorted({sources[i].group.file.filename for i, _, _ in spans}))
        raise UserError(f"{names}: expected the input columns that are listed there, got others ({e})") from e


def _gather(sources: Sequence[Source], name: str, spans: list[Span]) -> np.ndarray:
    """Return the values of a column in all spans joined."""
    groups = [(sources[i].group, start, stop) for i, start, stop in spans]
    return np.concatenate(
        [
            group[name][start:stop] if name in group else np.full(stop - start, (COLUMNS | ERROR_COLUMNS)[name].fill)
            for group, start, stop in groups
        ]
    )
