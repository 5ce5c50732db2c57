"""Finished rows on disk while a job runs: segment files, and the index that shows them as one file.

A segment holds the rows of one commit, or of several that were merged, sorted by (line, sample). Its name tells
which commits it covers, `seg-FIRST-LAST.h5`, so the segments in force are those whose range lies in no other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from hpcdecode.data.diskfile import open_segment
from hpcdecode.data.layout import (
    CHUNK_ROWS,
    ERROR_COLUMNS,
    ROW_COLUMNS,
    TOKEN_COLUMNS,
    TOKEN_OFFSETS,
    FileWriter,
    Table,
    create,
    write_attributes,
)

PARTS_SUFFIX = ".parts"
SEGMENT_PATTERN = "seg-*.h5"
FAN_IN = 8  # segments of one level that are merged into one of the next


class Segment(msgspec.Struct, frozen=True):
    first: int  # commits first..last, counted from 1
    last: int
    level: int  # merges that its rows went through
    rows: int
    tokens: int
    errors: int
    base: int  # tokens in all segments before it

    @property
    def name(self) -> str:
        return f"seg-{self.first:08d}-{self.last:08d}.h5"


def parts_folder(path: Path) -> Path:
    """Where the segments of the output `path` lie: beside it, so that both move together."""
    return path.with_name(path.name + PARTS_SUFFIX)


def segments_in(folder: Path) -> list[Segment]:
    """The segments in force in a folder of parts, in the order of their commits. Raises OSError."""
    found: list[Segment] = []
    for path in sorted(folder.glob(SEGMENT_PATTERN), key=_reach):
        first, last = _commits(path)
        if not found or last > found[-1].last:  # else its rows lie in a merged one
            found.append(_describe(path, first, last))
    return found


def _commits(path: Path) -> tuple[int, int]:
    _, first, last = path.stem.split("-")
    return int(first), int(last)


def _reach(path: Path) -> tuple[int, int]:
    first, last = _commits(path)
    return first, -last


def _describe(path: Path, first: int, last: int) -> Segment:
    with open_segment(path) as file:
        offsets = file[TOKEN_OFFSETS]
        rows, base = len(offsets) - 1, int(offsets[0])
        tokens, errors = int(offsets[rows]) - base, len(file["errors/line"])
    level = 0
    while FAN_IN ** (level + 1) <= last - first + 1:
        level += 1
    return Segment(first, last, level, rows, tokens, errors, base)


def joined(segments: Sequence[Segment]) -> Segment:
    """What the merge of neighbouring segments will be."""
    return Segment(
        first=segments[0].first,
        last=segments[-1].last,
        level=max(s.level for s in segments) + 1,
        rows=sum(s.rows for s in segments),
        tokens=sum(s.tokens for s in segments),
        errors=sum(s.errors for s in segments),
        base=segments[0].base,
    )


def segment_image(table: Table, base: int) -> bytes:
    """The bytes of a segment file."""
    with _memory_file() as file:
        writer = FileWriter(file, len(table.lengths), int(table.lengths.sum()), len(table.errors["line"]), base)
        writer.append_rows(table.rows, table.lengths, table.tokens)
        writer.append_errors(table.errors)
        return _image(file)


def index_image(segments: Sequence[Segment], folder: str, attributes: dict[str, Any]) -> bytes:
    """The bytes of the file that shows `segments`, in `folder` beside it, as one; its size depends on their number."""
    sources = [(f"{folder}/{s.name}".replace("%", "%%"), s) for s in segments]  # HDF5 reads %b as a pattern
    rows = [(name, s.rows) for name, s in sources]
    tokens = [(name, s.tokens) for name, s in sources]
    errors = [(name, s.errors) for name, s in sources]
    with _memory_file() as file:
        for column, kind in ROW_COLUMNS.items():
            _virtual(file, f"rows/{column}", kind, rows)
        for column, kind in TOKEN_COLUMNS.items():
            _virtual(file, f"rows/{column}", kind, tokens)
        for column, kind in ERROR_COLUMNS.items():
            _virtual(file, f"errors/{column}", kind, errors)
        _virtual_offsets(file, rows)
        write_attributes(file, attributes, complete=False)
        return _image(file)


def _virtual(file: h5py.File, name: str, kind: Any, sources: list[tuple[str, int]]) -> None:
    total = sum(count for _, count in sources)
    if total == 0:
        create(file, name, 0, kind, CHUNK_ROWS)
        return
    layout, start = h5py.VirtualLayout((total,), dtype=kind), 0
    for source, count in sources:
        if count:
            layout[start : start + count] = h5py.VirtualSource(source, name, (count,), dtype=kind)
            start += count
    file.create_virtual_dataset(name, layout)


def _virtual_offsets(file: h5py.File, sources: list[tuple[str, int]]) -> None:
    """n + 1 offsets: all but the last of each segment, as it is the first of the next; both of the last segment."""
    filled = [(source, count) for source, count in sources if count]
    if not filled:
        file[TOKEN_OFFSETS] = np.zeros(1, np.int64)
        return
    layout, start = h5py.VirtualLayout((sum(n for _, n in filled) + 1,), dtype="i8"), 0
    for source, count in filled:
        taken = count + (source == filled[-1][0])
        layout[start : start + taken] = h5py.VirtualSource(source, TOKEN_OFFSETS, (count + 1,), dtype="i8")[:taken]
        start += count
    file.create_virtual_dataset(TOKEN_OFFSETS, layout)


def _memory_file() -> h5py.File:
    return h5py.File("hpcdecode-image", "w", driver="core", backing_store=False)


def _image(file: h5py.File) -> bytes:
    file.flush()
    return file.id.get_file_image()
