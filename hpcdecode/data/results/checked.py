"""Results files are untrusted input: nothing is read from one before its structure was found to be that of layout.py.

A file may be the final one or the index of an unfinished job. Every dataset must lie in it as a hard link, have the
type and length of its column, and hold no more numbers than its bytes can. Only an index refers to other files: to
the segments in its own folder of parts, which are checked in the same way.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from hpcdecode.data.results.diskfile import open_segment
from hpcdecode.data.results.layout import (
    COLUMNS,
    ERROR_COLUMNS,
    FINISH,
    FINISH_REASONS,
    OFFSETS,
    RAGGED,
    STRING,
    TOKENS,
    Extent,
)
from hpcdecode.data.results.segments import SEGMENT_NAME, parts_folder
from hpcdecode.errors import UserError, first_line

_FILTERS = (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32)
_MOST_INFLATED = 1100  # bytes that one stored byte becomes at most; deflate's limit is 1,032
_MOST_CHUNK_BYTES = 1 << 28
_READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, OverflowError, MemoryError)


class Unsound(Exception):
    """A file is not built as results are."""


@contextmanager
def reading(path: str | os.PathLike) -> Iterator[None]:
    """Turn whatever HDF5 finds wrong with the content of a results file into a UserError that names the file."""
    try:
        yield
    except Unsound as e:
        raise UserError(f"{path}: expected a results file of hpcdecode generate: {e}") from None
    except BrokenPipeError:
        raise
    except _READ_ERRORS as e:
        raise UserError(f"{path}: expected a results file of hpcdecode generate: {first_line(e)}") from e


def open_results(path: str | os.PathLike) -> tuple[h5py.File, list[Path]]:
    """Open a results file, once it is found to be sound.

    Returns:
        The file, and the segments that it shows, none unless it is the index of an unfinished job.

    Raises:
        UserError: the file is none of results, is damaged, or refers to files that are none of its segments.
    """
    with reading(path):
        _require_regular(Path(os.path.realpath(path)))
        file = open_segment(Path(path))
        try:
            return file, check(file, Path(os.path.realpath(path)))
        except BaseException:
            file.close()
            raise


def open_sorted(path: Path) -> h5py.File:
    """Open a file that holds its own rows: a final one, or a segment. Raises as `open_results`."""
    file, sources = open_results(path)
    if sources:
        file.close()
        raise UserError(f"{path}: expected rows of its own, got the index of an unfinished job")
    return file


def check(file: h5py.File, path: Path) -> list[Path]:
    """Return the segments that `file`, at `path`, shows. Raises Unsound, and what h5py raises."""
    datasets = dict(_datasets(file))
    names: set[str] = set()
    for name, dataset in datasets.items():
        names |= _sources(dataset, name, path) if dataset.is_virtual else set()
        _require_size(dataset, name, file)
    sources = [path.parent / name for name in sorted(names)]
    if sources:
        _require_folder(parts_folder(path))
    found = Extent.sum([_extent_of(source) for source in sources]) if sources else None
    for name, dataset in datasets.items():
        if dataset.is_virtual and dataset.shape != _shape(found, name):
            raise Unsound(f"{name} has shape {dataset.shape}, its segments have {_shape(found, name)}")
    _require_lengths(datasets)
    return sources


def read_attribute(file: h5py.File, name: str) -> Any:
    """Value of a root attribute, which is JSON. Raises Unsound, and what h5py raises."""
    text = file.attrs[name]
    if not isinstance(text, str):
        raise Unsound(f"attribute {name} is no JSON text")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as e:
        raise Unsound(f"attribute {name} is no JSON text: {e}") from None


def ends_checked(ends: np.ndarray, path: str | os.PathLike) -> np.ndarray:
    """Offsets of neighbouring rows, [n + 1] int64, if they ascend; else raise a UserError that names the file."""
    if len(ends) and (np.diff(ends) < 0).any():
        raise UserError(f"{path}: expected offsets of tokens that ascend, got others; the file is damaged")
    return ends


def _require_regular(path: Path) -> None:
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise Unsound("it is a directory" if stat.S_ISDIR(mode) else "it is no regular file")


def _require_folder(folder: Path) -> None:
    try:
        mode = os.lstat(folder).st_mode
    except FileNotFoundError:
        raise Unsound(f"it shows rows that lie in {folder}, which is not there; move both files together") from None
    if not stat.S_ISDIR(mode):
        raise Unsound(f"{folder} is no folder")


def _extent_of(source: Path) -> Extent:
    try:
        mode = os.lstat(source).st_mode
    except FileNotFoundError:
        raise Unsound(f"it shows rows that lie in {source}, which is not there") from None
    if not stat.S_ISREG(mode):
        raise Unsound(f"{source} is no regular file")
    with open_segment(source) as file:
        if check_own(file):
            return Extent.of(file)
    raise Unsound(f"{source} refers to other files")


def check_own(file: h5py.File) -> bool:
    """Whether a file holds its own rows. Raises Unsound unless it is sound."""
    datasets = dict(_datasets(file))
    if any(dataset.is_virtual for dataset in datasets.values()):
        return False
    for name, dataset in datasets.items():
        _require_size(dataset, name, file)
    _require_lengths(datasets)
    return True


def _datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Every dataset of a results file by its path, with its type checked."""
    for group_name, kinds in (("rows", {**COLUMNS, **dict.fromkeys(RAGGED)}), ("errors", ERROR_COLUMNS)):
        group = _member(file, group_name, h5py.Group)
        for name, kind in kinds.items():
            optional = name not in ERROR_COLUMNS and name != TOKENS and (kind is None or kind.fill is not None)
            if optional and name not in group:
                continue
            dataset = _member(group, name, h5py.Dataset)
            _require_type(
                dataset, f"{group_name}/{name}", np.dtype("i8") if kind is None else getattr(kind, "dtype", kind)
            )
            if dataset.ndim != (2 if getattr(kind, "wide", False) else 1):
                raise Unsound(f"{group_name}/{name} has {dataset.ndim} dimensions")
            yield f"{group_name}/{name}", dataset


def _member(group: h5py.Group, name: str, kind: type) -> Any:
    link = group.get(name, getlink=True)
    if link is None:
        raise Unsound(f"it has no {group.name.strip('/')}/{name}".replace("no /", "no "))
    if not isinstance(link, h5py.HardLink):
        raise Unsound(f"{name} is a link to somewhere else")
    member = group[name]
    if not isinstance(member, kind):
        raise Unsound(f"{name} is no {kind.__name__.lower()}")
    return member


def _require_type(dataset: h5py.Dataset, name: str, expected: Any) -> None:
    if expected is STRING:
        info = h5py.check_string_dtype(dataset.dtype)
        good = info is not None and info.length is None
    elif expected is FINISH:
        good = h5py.check_enum_dtype(dataset.dtype) == FINISH_REASONS and dataset.dtype.itemsize == 1
    else:
        good = dataset.dtype.newbyteorder("=") == expected
    if not good:
        raise Unsound(f"{name} is of type {dataset.dtype}")


def _require_size(dataset: h5py.Dataset, name: str, file: h5py.File) -> None:
    """A dataset's numbers lie in this file, and are no more than its bytes can become."""
    if dataset.is_virtual:
        return
    if dataset.external:
        raise Unsound(f"{name} lies in another file")
    settings = dataset.id.get_create_plist()
    if any(settings.get_filter(i)[0] not in _FILTERS for i in range(settings.get_nfilters())):
        raise Unsound(f"{name} is packed in an unknown way")
    itemsize = dataset.id.get_type().get_size()
    claimed, stored = dataset.size * itemsize, dataset.id.get_storage_size()
    if stored > os.path.getsize(file.filename) or claimed > stored * _MOST_INFLATED:
        raise Unsound(f"{name} claims {claimed} bytes and has {stored}")
    if dataset.chunks and int(np.prod(dataset.chunks, dtype=object)) * itemsize > _MOST_CHUNK_BYTES:
        raise Unsound(f"{name} has chunks of {dataset.chunks}")


def _sources(dataset: h5py.Dataset, name: str, path: Path) -> set[str]:
    """Names of the files that a virtual dataset shows, relative to its own."""
    folder = parts_folder(path).name
    found = set()
    for source in dataset.virtual_sources():
        before, _, segment = source.file_name.rpartition("/")
        if before != folder.replace("%", "%%") or not re.fullmatch(SEGMENT_NAME, segment) or source.dset_name != name:
            raise Unsound(f"{name} refers to {source.file_name}, not to a segment in {folder}")
        found.add(f"{folder}/{segment}")
    return found


def _shape(extent: Extent | None, name: str) -> tuple[int, ...]:
    group, _, column = name.partition("/")
    if extent is None:
        return ()
    if group == "errors":
        return (extent.errors,)
    if column in RAGGED:
        return (extent.rows + 1,)
    return extent.shape(column) if column in extent.widths else ()


def _require_lengths(datasets: dict[str, h5py.Dataset]) -> None:
    rows, errors = len(datasets["rows/line"]), len(datasets["errors/line"])
    entries = {}
    for name in RAGGED:
        ends = datasets.get(f"rows/{name}")
        if ends is not None and len(ends) != rows + 1:
            raise Unsound(f"rows/{name} has {len(ends)} entries for {rows} rows")
        entries[name] = int(ends[-1]) - int(ends[0]) if ends is not None else 0
    for name, dataset in datasets.items():
        column = name.partition("/")[2]
        expected = errors if name.startswith("errors/") else entries.get(OFFSETS.get(column, ""), rows)
        if column not in RAGGED and len(dataset) != expected:
            raise Unsound(f"{name} has {len(dataset)} entries, not {expected}")
