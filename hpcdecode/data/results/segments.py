"""Finished rows on disk while a job runs: segment files, and the index that shows them as one file.

A segment holds the rows of one commit, or of several that were merged, sorted by (line, sample). Its name tells
which commits it covers, `seg-FIRST-LAST.h5`, so the segments in force are those whose range lies in no other's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.layout import (
    COLUMNS,
    ERROR_COLUMNS,
    RAGGED,
    TOKENS,
    Column,
    Extent,
    FileWriter,
    Table,
    create,
    write_attributes,
)
from hpcdecode.data.results.seal import sealed

PARTS_SUFFIX = ".parts"
SEGMENT_NAME = r"seg-(\d{8,16})-(\d{8,16})\.h5"
FAN_IN = 8  # segments of one level that are merged into one of the next


class Segment(msgspec.Struct, frozen=True):
    first: int  # commits first..last, counted from 1
    last: int
    level: int  # merges that its rows went through
    extent: Extent
    base: dict[str, int]  # by offsets: entries in all segments before it

    @staticmethod
    def of(file: h5py.File, first: int, last: int) -> Segment:
        """The segment in an open file."""
        rows, level = file["rows"], 0
        base = {name: int(rows[name][0]) if name in rows else 0 for name in RAGGED}
        while FAN_IN ** (level + 1) <= last - first + 1:
            level += 1
        return Segment(first, last, level, Extent.of(file), base)

    @property
    def name(self) -> str:
        return f"seg-{self.first:08d}-{self.last:08d}.h5"

    @property
    def weight(self) -> int:
        """Rows and errors."""
        return self.extent.rows + self.extent.errors

    @property
    def end(self) -> dict[str, int]:
        """The base of the segment after it."""
        return {name: self.base[name] + self.extent.entries[name] for name in RAGGED}


def parts_folder(path: Path) -> Path:
    """Where the segments of the output `path` lie: beside it, so that both move together."""
    return path.with_name(path.name + PARTS_SUFFIX)


def segment_files(folder: Path) -> list[Path]:
    """Files with the name of a segment. Raises OSError."""
    return [path for path in folder.iterdir() if re.fullmatch(SEGMENT_NAME, path.name)] if folder.is_dir() else []


def in_force(paths: Iterable[Path]) -> list[Path]:
    """Of segments, those whose commits are in no other's, in the order of their commits."""
    found: list[Path] = []
    for path in sorted(paths, key=_reach):
        if not found or _commits(path)[1] > _commits(found[-1])[1]:  # else its rows lie in a merged one
            found.append(path)
    return found


def segments_in(folder: Path) -> list[Segment]:
    """The segments in force in a folder of parts, in the order of their commits. Raises OSError and KeyError."""
    return [describe(path) for path in in_force(segment_files(folder))]


def missing_commits(paths: Iterable[Path]) -> list[tuple[int, int]]:
    """(First, last) of the commits before the last one that no segment holds."""
    held = list(map(_commits, in_force(paths)))
    ends = [0, *(last for _, last in held)]
    return [(end + 1, first - 1) for end, (first, _) in zip(ends, held, strict=False) if first > end + 1]


def _commits(path: Path) -> tuple[int, int]:
    first, last = re.fullmatch(SEGMENT_NAME, path.name).groups()
    return int(first), int(last)


def _reach(path: Path) -> tuple[int, int]:
    first, last = _commits(path)
    return first, -last


def describe(path: Path) -> Segment:
    """Read what a segment holds. Raises OSError and KeyError."""
    with open_segment(path) as file:
        return Segment.of(file, *_commits(path))


def joined(segments: Sequence[Segment]) -> Segment:
    """What the merge of neighbouring segments will be."""
    return Segment(
        first=segments[0].first,
        last=segments[-1].last,
        level=max(s.level for s in segments) + 1,
        extent=Extent.sum([s.extent for s in segments]),
        base=segments[0].base,
    )


def segment_image(table: Table, base: dict[str, int], job: str) -> bytes:
    """The bytes of a segment file, sealed for `job`."""
    with _memory_file() as file:
        writer = FileWriter(file, table.extent(), base)
        writer.append_rows(table.rows, table.lengths, table.entries)
        writer.append_errors(table.errors)
        return sealed(_image(file), job)


def index_image(segments: Sequence[Segment], folder: str, attributes: dict[str, Any]) -> bytes:
    """The bytes of the file that shows `segments`, in `folder` beside it, as one; its size depends on their number."""
    sources = [(f"{folder}/{s.name}".replace("%", "%%"), s.extent) for s in segments]  # HDF5 reads %b as a pattern
    total = Extent.sum([s.extent for s in segments])
    with _memory_file() as file:
        for name in total.widths:
            parts = [(source, e.length(name), e.shape(name) if name in e.widths else None) for source, e in sources]
            _virtual(file, f"rows/{name}", COLUMNS[name], total.shape(name), parts)
        for name, kind in ERROR_COLUMNS.items():
            parts = [(source, e.errors, (e.errors,)) for source, e in sources]
            _virtual(file, f"errors/{name}", Column(kind), (total.errors,), parts)
        for name in RAGGED:
            if total.entries[name] or name == TOKENS:
                _virtual_offsets(file, f"rows/{name}", [(source, e.rows) for source, e in sources if e.rows])
        write_attributes(file, attributes, complete=False)
        return _image(file)


Part = tuple[str, int, tuple[int, ...] | None]  # a file, how much of the whole it is, its shape if it has the column


def _virtual(file: h5py.File, name: str, column: Column, shape: tuple[int, ...], parts: list[Part]) -> None:
    if 0 in shape:
        create(file, name, shape, column)
        return
    layout, start = h5py.VirtualLayout(shape, dtype=column.dtype), 0
    for source, length, own in parts:
        if own is not None and 0 not in own:
            place = (slice(start, start + length), *map(slice, own[1:]))
            layout[place] = h5py.VirtualSource(source, name, own, dtype=column.dtype)
        start += length
    file.create_virtual_dataset(name, layout, fillvalue=column.fill)


def _virtual_offsets(file: h5py.File, name: str, filled: list[tuple[str, int]]) -> None:
    """n + 1 offsets: all but the last of each segment, as it is the first of the next; both of the last segment.

    Only a first segment may lack them, if it was a final file before: its rows have none of these entries, so HDF5's
    fill value, 0, is right for them.
    """
    if not filled:
        file[name] = np.zeros(1, np.int64)
        return
    layout, start = h5py.VirtualLayout((sum(n for _, n in filled) + 1,), dtype="i8"), 0
    for source, count in filled:
        taken = count + (source == filled[-1][0])
        layout[start : start + taken] = h5py.VirtualSource(source, name, (count + 1,), dtype="i8")[:taken]
        start += count
    file.create_virtual_dataset(name, layout)


def _memory_file() -> h5py.File:
    return h5py.File("hpcdecode-image", "w", driver="core", backing_store=False)


def _image(file: h5py.File) -> bytes:
    file.flush()
    return file.id.get_file_image()
