"""Sorted segments into one sorted file, a bounded stretch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import h5py
import numpy as np

from hpcdecode.data.diskfile import open_segment
from hpcdecode.data.layout import ERROR_COLUMNS, ROW_COLUMNS, TOKEN_COLUMNS, TOKEN_OFFSETS, FileWriter

STRETCH_ROWS = 8192
STRETCH_TOKENS = 1 << 20
_HEAD_ROWS = 1 << 15  # keys held in memory, all sources together
_SAMPLE_BITS = 20

Span = tuple[int, int, int]  # source, first row, row after the last


def merge(paths: Sequence[Path], out: h5py.File, check: Callable[[], None], base: int = 0) -> None:
    """Write the rows of all segments `paths` to `out` by (line, sample), their errors by line.

    Each segment is sorted already. base: where the token offsets of `out` begin. check: called after each stretch, it
    may raise to stop the merge. Memory does not grow with the number of rows. Raises OSError for unreadable segments.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_segment(path)) for path in paths]
        rows = [_RowSource(file) for file in files]
        errors = [_ErrorSource(file) for file in files]
        totals = sum(s.length for s in rows), sum(s.tokens for s in rows), sum(s.length for s in errors)
        writer = FileWriter(out, *totals, base)
        for spans, order in _stretches(rows):
            _copy_rows(rows, spans, order, writer)
            check()
        for spans, order in _stretches(errors):
            columns = {name: _gather(errors, name, spans)[order] for name in ERROR_COLUMNS}
            writer.append_errors(columns)
            check()


class _Source:
    """One table of one segment: its columns, its sort keys, and how far it is merged."""

    def __init__(self, group: h5py.Group) -> None:
        self.group = group
        self.length = len(group["line"])
        self.merged = 0  # rows already written
        self.head_keys = self.head_lengths = np.empty(0, np.int64)  # of the rows from `merged` on

    def fill(self, count: int) -> None:
        """Have the keys and token counts of the next `count` rows at hand, unless some are left."""
        if len(self.head_keys) == 0 and self.merged < self.length:
            stop = min(self.merged + count, self.length)
            self.head_keys = self.keys(self.merged, stop)
            self.head_lengths = self.lengths(self.merged, stop)

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
        self.offsets = file[TOKEN_OFFSETS]
        self.base = int(self.offsets[0])
        self.tokens = int(self.offsets[self.length]) - self.base

    def keys(self, start: int, stop: int) -> np.ndarray:
        return (self.group["line"][start:stop] << _SAMPLE_BITS) + self.group["sample"][start:stop]

    def lengths(self, start: int, stop: int) -> np.ndarray:
        return np.diff(self.offsets[start : stop + 1])


def _stretches(sources: Sequence[_Source]) -> Iterator[tuple[list[Span], np.ndarray]]:
    """Cut the merged order into stretches: spans of sources, and the permutation that sorts them joined."""
    head_rows = max(256, _HEAD_ROWS // max(1, len(sources)))
    while sources:
        for source in sources:
            source.fill(head_rows)
        takes = _next_counts(sources)
        if not takes.any():
            return
        spans = [(i, s.merged, s.merged + int(n)) for i, (s, n) in enumerate(zip(sources, takes, strict=True)) if n]
        keys = np.concatenate([sources[i].head_keys[: b - a] for i, a, b in spans])
        yield spans, np.argsort(keys, kind="stable")
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


def _copy_rows(sources: Sequence[_RowSource], spans: list[Span], order: np.ndarray, writer: FileWriter) -> None:
    rows = {name: _gather(sources, name, spans)[order] for name in ROW_COLUMNS}
    lengths = np.concatenate([sources[i].head_lengths[: b - a] for i, a, b in spans])
    starts = np.cumsum(lengths) - lengths
    lengths = lengths[order]
    shift = starts[order] - (np.cumsum(lengths) - lengths)
    picked = np.repeat(shift, lengths) + np.arange(int(lengths.sum()))
    tokens = {name: _gather_tokens(sources, name, spans)[picked] for name in TOKEN_COLUMNS}
    writer.append_rows(rows, lengths, tokens)


def _gather(sources: Sequence[_Source], name: str, spans: list[Span]) -> np.ndarray:
    return np.concatenate([sources[i].group[name][a:b] for i, a, b in spans])


def _gather_tokens(sources: Sequence[_RowSource], name: str, spans: list[Span]) -> np.ndarray:
    pieces = []
    for i, a, b in spans:
        source = sources[i]
        start, stop = int(source.offsets[a]) - source.base, int(source.offsets[b]) - source.base
        pieces.append(source.group[name][start:stop])
    return np.concatenate(pieces)
