"""Opens results files, which are untrusted input: checks that one has the structure of layout.py before it is read.

A file may be a final one or the index of an unfinished job. Each dataset must be a hard link, have the type and length
of its column, and claim no more values than its stored bytes can unpack to. Only an index may refer to other files:
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
from hpcdecode.data.results.inputs import InputColumns, final_datasets
from hpcdecode.data.results.layout import (
    COLUMNS,
    ERROR_COLUMNS,
    INPUTS,
    OFFSETS,
    OFFSETS_COLUMN,
    PROMPTS,
    RAGGED,
    Column,
    Extent,
)
from hpcdecode.data.results.segments import SEGMENT_NAME, parts_folder
from hpcdecode.data.results.structure import Unsound, member, require_size, require_type
from hpcdecode.errors import UserError, first_line

_READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, OverflowError, MemoryError)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn exceptions about the content of a results file into a UserError that names the file."""
    try:
        yield
    except Unsound as e:
        raise UserError(f"{path}: expected a results file of hpcdecode generate: {e}") from None
    except BrokenPipeError:
        raise
    except _READ_ERRORS as e:
        raise UserError(f"{path}: expected a results file of hpcdecode generate: {first_line(e)}") from e


def open_results(path: str | os.PathLike[str]) -> tuple[h5py.File, list[Path]]:
    """Open a results file and check its structure.

    Returns:
        The file, and its segments if it is the index of an unfinished job.

    Raises:
        UserError: It is not a results file, is damaged, or refers to files other than its segments.
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
    """Open a file with rows of its own: a final one or a segment.

    Raises:
        UserError: It is not a results file, is damaged, or is the index of an unfinished job.
    """
    file, sources = open_results(path)
    if sources:
        file.close()
        raise UserError(f"{path}: expected rows of its own, got the index of an unfinished job")
    return file


def check(file: h5py.File, path: Path) -> list[Path]:
    """Check the structure of a results file.

    Args:
        file: The open file.
        path: Its path, with links followed.

    Returns:
        Its segments if it is an index, else none.

    Raises:
        Unsound: The structure is not that of a results file.
        Exception: The file is damaged; h5py raises exceptions of many types.
    """
    datasets = dict(_datasets(file))
    names: set[str] = set()
    for name, dataset in datasets.items():
        names |= _sources(dataset, name, path) if dataset.is_virtual else set()
        require_size(dataset, name, file)
    sources = [path.parent / name for name in sorted(names)]
    if sources:
        _require_kind(parts_folder(path), stat.S_IFDIR, "folder", "; move both files together")
    found = Extent.sum([_extent_of(source) for source in sources]) if sources else None
    for name, dataset in datasets.items():
        if dataset.is_virtual and dataset.shape != _shape(found, name):
            raise Unsound(f"{name} has shape {dataset.shape}, its segments have {_shape(found, name)}")
    _require_lengths(datasets)
    return sources


def read_attribute(file: h5py.File, name: str) -> Any:
    """Return the value of a root attribute, which is stored as JSON.

    Raises:
        Unsound: It is not JSON text.
        Exception: The file is damaged; h5py raises exceptions of many types.
    """
    text = file.attrs[name]
    if not isinstance(text, str):
        raise Unsound(f"attribute {name} is no JSON text")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as e:
        raise Unsound(f"attribute {name} is no JSON text: {e}") from None


def checked_offsets(offsets: np.ndarray, path: str | os.PathLike[str]) -> np.ndarray:
    """Return the offsets of neighbouring rows, [n + 1] int64.

    Raises:
        UserError: They do not ascend.
    """
    if len(offsets) and (np.diff(offsets) < 0).any():
        raise UserError(f"{path}: expected offsets of tokens that ascend, got others; the file is damaged")
    return offsets


def _require_regular(path: Path) -> None:
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise Unsound("it is a directory" if stat.S_ISDIR(mode) else "it is no regular file")


def _require_kind(path: Path, kind: int, name: str, advice: str = "") -> None:
    """Raise Unsound unless the rows of an index are where it says, in a file of this kind and not behind a link.

    Args:
        path: A segment, or the folder of parts.
        kind: The kind's bits of a mode, as in `stat`.
        name: The kind's name.
        advice: End of the message if the path does not exist.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        raise Unsound(f"it shows rows that lie in {path}, which is not there{advice}") from None
    if stat.S_IFMT(mode) != kind:
        raise Unsound(f"{path} is no {name}")


def _extent_of(source: Path) -> Extent:
    """Return the extent of a segment. Raises Unsound if it is missing or its structure is wrong."""
    _require_kind(source, stat.S_IFREG, "regular file")
    with open_segment(source) as file:
        if check_own(file):
            return Extent.of(file)
    raise Unsound(f"{source} refers to other files")


def check_own(file: h5py.File) -> bool:
    """Return whether a file has rows of its own, and check its structure.

    Raises:
        Unsound: The structure is not that of a results file.
        Exception: The file is damaged; h5py raises exceptions of many types.
    """
    datasets = dict(_datasets(file))
    if any(dataset.is_virtual for dataset in datasets.values()):
        return False
    for name, dataset in datasets.items():
        require_size(dataset, name, file)
    _require_lengths(datasets)
    return True


def _datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield each dataset of a results file with its path, once its type is checked."""
    for group_name, columns in (("rows", COLUMNS | dict.fromkeys(RAGGED, OFFSETS_COLUMN)), ("errors", ERROR_COLUMNS)):
        group = member(file, group_name, h5py.Group)
        for name, column in columns.items():
            optional = column.fill is not None or name in (PROMPTS, INPUTS)
            if optional and name not in group:
                continue
            dataset = member(group, name, h5py.Dataset)
            require_type(dataset, f"{group_name}/{name}", column)
            yield f"{group_name}/{name}", dataset
    if "input" in file:
        yield from _input_datasets(file)


def _input_datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield the datasets of input columns of a final file, once their types are checked."""
    groups = {name: member(file, name, h5py.Group) for name in ("rows", "input")}
    if INPUTS in groups["rows"]:  # they are packed
        return
    for path, dtype in final_datasets(InputColumns.of(file)).items():
        group, _, name = path.partition("/")
        dataset = member(groups[group], name, h5py.Dataset)
        require_type(dataset, path, Column(dtype))
        yield path, dataset


def _sources(dataset: h5py.Dataset, name: str, path: Path) -> set[str]:
    """Return the paths of the segments that a virtual dataset of the file `path` shows, relative to that file.

    Raises:
        Unsound: It refers to another file, or to another dataset of a segment.
    """
    folder = parts_folder(path).name
    found = set()
    for source in dataset.virtual_sources():
        before, _, segment = source.file_name.rpartition("/")
        if before != folder.replace("%", "%%") or not re.fullmatch(SEGMENT_NAME, segment) or source.dset_name != name:
            raise Unsound(f"{name} refers to {source.file_name}, not to a segment in {folder}")
        found.add(f"{folder}/{segment}")
    return found


def _shape(extent: Extent | None, name: str) -> tuple[int, ...]:
    """Return the shape that a virtual dataset must have, given the extent of all segments."""
    group, _, column = name.partition("/")
    if extent is None:
        return ()
    if group == "errors":
        return (extent.errors,)
    if column in RAGGED:
        return (extent.rows + 1,)
    return extent.shape(column) if column in extent.widths else ()


def _require_lengths(datasets: dict[str, h5py.Dataset]) -> None:
    """Raise Unsound unless all datasets have as many entries as rows, errors and offsets say."""
    rows, errors = len(datasets["rows/line"]), len(datasets["errors/line"])
    entries = {}
    for name in RAGGED:
        ends = datasets.get(f"rows/{name}")
        if ends is not None and len(ends) != rows + 1:
            raise Unsound(f"rows/{name} has {len(ends)} entries for {rows} rows")
        entries[name] = int(ends[-1]) - int(ends[0]) if ends is not None else 0
    for name, dataset in datasets.items():
        group, _, column = name.partition("/")
        ends_of = OFFSETS.get(column, "") if group == "rows" else ""
        expected = errors if group == "errors" else entries.get(ends_of, rows)
        if not (group == "rows" and column in RAGGED) and len(dataset) != expected:
            raise Unsound(f"{name} has {len(dataset)} entries, not {expected}")
