"""The files of a job that runs: segments with the finished rows, and the index that shows them as one file.

A segment has the rows of one commit, or of several commits that were merged, sorted by line and sample. Its name
`seg-FIRST-LAST.h5` states the commits. A segment is live unless another one includes all its commits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import msgspec
import numpy as np

from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.file_writer import FileWriter
from hpcdecode.data.results.layout import (
    COLUMNS,
    ERROR_COLUMNS,
    OFFSETS_COLUMN,
    RAGGED,
    TOKENS,
    Column,
    Extent,
    Table,
    create,
    fill_of,
    write_attributes,
)
from hpcdecode.data.results.seal import sealed

PARTS_SUFFIX = ".parts"
SEGMENT_NAME = r"seg-(\d{8,16})-(\d{8,16})\.h5"
_images = itertools.count(1)
FAN_IN = 8  # segments of one level that are merged into one of the next level


class Segment(msgspec.Struct, frozen=True):
    """A segment file.

    Attributes:
        first: Its first commit, counted from 1.
        last: Its last commit.
        level: Number of merges that its rows went through.
        extent: Its size.
        base: Number of entries in all segments before it, by the name of their offsets.
    """

    first: int
    last: int
    level: int
    extent: Extent
    base: dict[str, int]

    @staticmethod
    def of(file: h5py.File, first: int, last: int) -> Segment:
        """Return the segment in an open file, which has the commits `first` to `last`."""
        rows, level = file["rows"], 0
        base = {name: int(rows[name][0]) if name in rows else 0 for name in RAGGED}
        while FAN_IN ** (level + 1) <= last - first + 1:
            level += 1
        return Segment(first, last, level, Extent.of(file), base)

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"seg-{self.first:08d}-{self.last:08d}.h5"

    @property
    def weight(self) -> int:
        """Number of rows and errors."""
        return self.extent.rows + self.extent.errors

    @property
    def end(self) -> dict[str, int]:
        """Base of the segment after it."""
        return {name: self.base[name] + self.extent.entries[name] for name in RAGGED}


def parts_folder(path: Path) -> Path:
    """Return the folder of the segments of the output `path`. It is beside the output, so that both move together."""
    return path.with_name(path.name + PARTS_SUFFIX)


def segment_files(folder: Path) -> list[Path]:
    """Return the files in a folder that have the name of a segment. Raises OSError if it cannot be read."""
    return [path for path in folder.iterdir() if re.fullmatch(SEGMENT_NAME, path.name)] if folder.is_dir() else []


def live(paths: Iterable[Path]) -> list[Path]:
    """Return those segments that are not included in another one, in the order of their commits."""
    found: list[Path] = []
    for path in sorted(paths, key=_longest_first):
        if not found or _commits(path)[1] > _commits(found[-1])[1]:  # else a merged segment includes it
            found.append(path)
    return found


def segments_in(folder: Path) -> list[Segment]:
    """Return the live segments of a folder of parts, in the order of their commits.

    Raises:
        OSError: A segment cannot be read.
        KeyError: A segment lacks a dataset.
    """
    return [describe(path) for path in live(segment_files(folder))]


def missing_commits(paths: Iterable[Path]) -> list[tuple[int, int]]:
    """Return the ranges (first, last) of commits that no segment has, up to the last commit of all."""
    held = list(map(_commits, live(paths)))
    ends = [0, *(last for _, last in held)]
    return [(end + 1, first - 1) for end, (first, _) in zip(ends, held, strict=False) if first > end + 1]


def _commits(path: Path) -> tuple[int, int]:
    """Return the first and the last commit of a segment file."""
    match = re.fullmatch(SEGMENT_NAME, path.name)
    assert match is not None, f"{path.name} is the name of a segment"
    return int(match[1]), int(match[2])


def _longest_first(path: Path) -> tuple[int, int]:
    """Return a key that sorts segments by their first commit, of several the one with the most commits first."""
    first, last = _commits(path)
    return first, -last


def describe(path: Path) -> Segment:
    """Read the extent and base of a segment file.

    Raises:
        OSError: The file cannot be read.
        KeyError: It lacks a dataset.
    """
    with open_segment(path) as file:
        return Segment.of(file, *_commits(path))


def joined(segments: Sequence[Segment]) -> Segment:
    """Return the segment that neighbouring segments will be merged into."""
    return Segment(
        first=segments[0].first,
        last=segments[-1].last,
        level=max(s.level for s in segments) + 1,
        extent=Extent.sum([s.extent for s in segments]),
        base=segments[0].base,
    )


def segment_image(table: Table, base: dict[str, int], job: str) -> bytes:
    """Return the bytes of a segment file with the rows of a table, sealed for the job named `job`."""
    with _memory_file() as file:
        writer = FileWriter(file, table.extent(), base)
        writer.append_rows(table.rows, table.lengths, table.entries)
        writer.append_errors(table.errors)
        return sealed(_image(file), job)


def index_image(segments: Sequence[Segment], folder: str, attributes: dict[str, Any]) -> bytes:
    """Return the bytes of an index, which shows segments as one file of virtual datasets.

    Its size depends on the number of segments, not on their rows.

    Args:
        segments: The segments, in the order of their commits.
        folder: Name of their folder, which is beside the index.
        attributes: Root attributes.
    """
    sources = [(f"{folder}/{s.name}".replace("%", "%%"), s.extent) for s in segments]  # HDF5 reads %b as a pattern
    total = Extent.sum([s.extent for s in segments])
    with _memory_file() as file:
        for name in total.widths:
            shapes = [e.shape(name) if name in e.widths else None for _, e in sources]
            parts = [_Part(source, e.length(name), shape) for (source, e), shape in zip(sources, shapes, strict=True)]
            _virtual(file, f"rows/{name}", COLUMNS[name], total.shape(name), parts)
        for name in total.error_columns:
            own = [(e.errors,) if name in e.error_columns else None for _, e in sources]
            parts = [_Part(source, e.errors, shape) for (source, e), shape in zip(sources, own, strict=True)]
            _virtual(file, f"errors/{name}", ERROR_COLUMNS[name], (total.errors,), parts)
        for name in RAGGED:
            if total.entries[name] or name == TOKENS:
                _virtual_offsets(file, f"rows/{name}", [(source, e.rows) for source, e in sources if e.rows])
        total.inputs.write_to(file)
        write_attributes(file, attributes, complete=False)
        return _image(file)


class _Part(NamedTuple):
    """A segment's part of a virtual dataset.

    Attributes:
        source: Path of the segment, relative to the index.
        length: Number of entries in the virtual dataset.
        shape: Shape of the dataset in the segment, or None if it has none.
    """

    source: str
    length: int
    shape: tuple[int, ...] | None


def _virtual(file: h5py.File, name: str, column: Column, shape: tuple[int, ...], parts: list[_Part]) -> None:
    """Create a virtual dataset of this shape, which joins the parts."""
    if 0 in shape:
        create(file, name, shape, column)
        return
    layout, start = h5py.VirtualLayout(shape, dtype=column.dtype), 0
    for source, length, own in parts:
        if own is not None and 0 not in own:
            place = (slice(start, start + length), *map(slice, own[1:]))
            layout[place] = h5py.VirtualSource(source, name, own, dtype=column.dtype)
        start += length
    file.create_virtual_dataset(name, layout, fillvalue=fill_of(column))


def _virtual_offsets(file: h5py.File, name: str, filled: list[tuple[str, int]]) -> None:
    """Create the virtual dataset of n + 1 offsets for n rows.

    It has all offsets of each segment but the last one, which is the first one of the next segment. It has all offsets
    of the last segment. Only the first segment may lack them, if it was a final file before. Its rows then have no
    entries, so that HDF5's fill value 0 is their offset.

    Args:
        file: The index.
        name: Name of the dataset.
        filled: Path, relative to the index, and number of rows of each segment with rows.
    """
    if not filled:
        file[name] = np.zeros(1, np.int64)
        return
    layout, start = h5py.VirtualLayout((sum(n for _, n in filled) + 1,), dtype=OFFSETS_COLUMN.dtype), 0
    for source, count in filled:
        taken = count + (source == filled[-1][0])
        offsets = h5py.VirtualSource(source, name, (count + 1,), dtype=OFFSETS_COLUMN.dtype)
        layout[start : start + taken] = offsets[:taken]
        start += count
    file.create_virtual_dataset(name, layout)


def _memory_file() -> h5py.File:
    name = f"hpcdecode-image-{next(_images)}"  # its own, since HDF5 opens one of a name at a time, in all threads
    return h5py.File(name, "w", driver="core", backing_store=False)


def _image(file: h5py.File) -> bytes:
    """Return the bytes of a file in memory."""
    file.flush()
    image: bytes = file.id.get_file_image()
    return image
