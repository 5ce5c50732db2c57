"""Reads the rows of tables: Parquet files, and HDF5 files of 1-D datasets, such as the results of another job."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h5py
import numpy as np

from hpcdecode.data.prompts.extras import import_extra
from hpcdecode.data.prompts.hints import flags_hint
from hpcdecode.data.prompts.unknown import UnknownFields
from hpcdecode.data.prompts.values import printable
from hpcdecode.errors import UserError

TABLES = (".parquet", ".h5", ".hdf5")
_ROWS = 1024  # rows of an HDF5 file that are read at once
_PARQUET_ROWS = 128  # rows of a Parquet file that are decoded at once: small files may hold large values
_MAX_READ_BYTES = 64 << 20  # of an HDF5 dataset at once, and of each of its chunks, which HDF5 decodes whole
_MAX_RATIO = 2000  # of a column's size to the bytes stored; deflate reaches 1,032
_MAX_UNPACKED_BYTES = 1 << 30  # of a Parquet column chunk that exceeds this ratio


def table_rows(path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    """Return an iterator over the rows of a table, as dicts of Python values by column.

    Args:
        path: Path of the file.
        column: Column of the prompts. In HDF5 this is the path of a dataset; the other columns are in the same group.
            None if the columns have the names of the fields of JSON rows.
        unknown: Knows the names of the other columns to read.

    Raises:
        UserError: There is no such column, or its data are in another file.
        Exception: The file is broken; pyarrow and h5py raise exceptions of many types.
    """
    read = _parquet if path.endswith(".parquet") else _hdf5
    return read(path, column, unknown)


def _parquet(path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    file = import_extra("pyarrow.parquet", path, "parquet").ParquetFile(path)
    names: list[str] = file.schema_arrow.names
    _require_prompts(path, column, names, names, unknown)
    unknown.columns(path, names)
    used = [name for name in names if unknown.reads(name)]
    for name in used:
        _require_once(path, name, names)
    _check_sizes(path, file.metadata, used)
    for name in dict.fromkeys(names):
        if not unknown.reads(name) and unknown.keeps(name):
            with _optional(unknown):
                _require_once(path, name, names)
                _check_sizes(path, file.metadata, [name])
                used.append(name)
    for batch in file.iter_batches(_PARQUET_ROWS, columns=used):
        batch = _with_readable_times(batch, unknown.known)
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            yield from _without_text(batch)


@contextmanager
def _optional(unknown: UnknownFields) -> Iterator[None]:
    """Turn the refusal of a column that is only to be kept into a warning, unless it was asked for by name."""
    try:
        yield
    except UserError as e:
        if unknown.kept is None or not unknown.kept.all:
            raise
        unknown.tell(f"{e}; the column is not kept")


def _require_once(path: str, name: str, names: list[str]) -> None:
    if names.count(name) > 1:
        raise _refused(path, name, f"one column of this name, found {names.count(name)}")


def _with_readable_times(batch: Any, known: Collection[str]) -> Any:
    """Return a batch in which times in columns that are only kept are text, as Python has no type for all of them."""
    import pyarrow

    for index, field in enumerate(batch.schema):
        if field.name not in known and pyarrow.types.is_temporal(field.type):
            with suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
                batch = batch.set_column(index, field.name, batch.column(index).cast(pyarrow.string()))
    return batch


def _check_sizes(path: str, metadata: Any, used: list[str]) -> None:
    """Raise UserError if a column claims a far greater size than its stored bytes can unpack to."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            size, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
            place = chunk.path_in_schema
            name = next((n for n in used if place == n or place.startswith(n + ".")), None)
            if name is not None and size > max(_MAX_UNPACKED_BYTES, _MAX_RATIO * stored):
                raise _refused(path, name, f"a column of prompts, got {size} bytes of which {stored} are stored")


def _without_text(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch in which some text is not UTF-8. Such text stays bytes, which every field refuses."""
    import pyarrow

    text = (pyarrow.string(), pyarrow.large_string())
    columns = [c.cast(pyarrow.large_binary()) if c.type in text else c for c in batch.columns]
    for values in zip(*columns, strict=True):
        yield {name: _decoded(v.as_py()) for name, v in zip(batch.schema.names, values, strict=True)}


def _hdf5(path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    with h5py.File(path, locking=False, rdcc_nbytes=_MAX_READ_BYTES) as file:
        folder, _, own = (column or "").rpartition("/")
        group = _group(path, file, folder)
        present = [] if group is None else list(group)
        names = [name for name in present if name == own or unknown.reads(name)]
        columns = {name: data for name in names if (data := _dataset(path, group, name)) is not None}
        for name in present:
            if name not in names and unknown.keeps(name):
                with _optional(unknown):
                    if (data := _dataset(path, group, name)) is not None:
                        columns[name] = data
        called = {own: column} if column else {}  # the prompt's dataset goes by its path
        usable = [called.get(name, name) for name in columns if name in names]
        _require_prompts(path, column, usable, present, unknown)
        unknown.columns(path, present)
        length = len(columns[own] if own else next(data for name, data in columns.items() if unknown.reads(name)))
        columns = {called.get(name, name): data for name, data in columns.items() if len(data) == length}
        count = min([_ROWS, *(_MAX_READ_BYTES // max(data.dtype.itemsize, 1) for data in columns.values())])
        for start in range(0, length, count):
            values = [_values(data, slice(start, start + count)) for data in columns.values()]
            for row in zip(*values, strict=True):
                yield dict(zip(columns, row, strict=True))


def _group(path: str, group: h5py.Group, folder: str) -> h5py.Group | None:
    """Return the group at `folder` in the same file, or None if there is none."""
    for name in filter(None, folder.split("/")):
        group = _member(path, group, name)
        if not isinstance(group, h5py.Group):
            return None
    return group


def _dataset(path: str, group: h5py.Group, name: str) -> h5py.Dataset | None:
    """Return a column, or None if the member is not a 1-D dataset.

    Raises:
        UserError: It is not safe to read the dataset: its data are in another file, or its size is implausible.
    """
    data = _member(path, group, name)
    if not isinstance(data, h5py.Dataset) or data.ndim != 1:
        return None
    if data.is_virtual or data.external:
        raise _elsewhere(path, name, "a virtual dataset" if data.is_virtual else "external storage")
    chunk = (data.chunks or (1,))[0] * data.dtype.itemsize
    if chunk > _MAX_READ_BYTES:
        expected = f"elements and chunks of at most {_MAX_READ_BYTES} bytes"
        raise UserError(f"prompt file {printable(path)}: {printable(name)}: expected {expected}, got {chunk}")
    if data.nbytes > _MAX_RATIO * data.id.get_storage_size():
        got = f"{data.nbytes} bytes of which {data.id.get_storage_size()} are stored"
        raise UserError(
            f"prompt file {printable(path)}: {printable(name)}: expected a dataset that was written, got {got}"
        )
    return data


def _member(path: str, group: h5py.Group, name: str) -> Any:
    """Return a member of a group, or None if there is none.

    Raises:
        UserError: It is a soft or external link, which may lead to another file.
    """
    link = group.get(name, getlink=True)
    if isinstance(link, (h5py.ExternalLink, h5py.SoftLink)):
        raise _elsewhere(path, name, "an external link" if isinstance(link, h5py.ExternalLink) else "a soft link")
    return group.get(name) if link is not None else None


def _elsewhere(path: str, name: str, got: str) -> UserError:
    return _refused(
        path,
        name,
        f"data that lie in this file itself, got {got}; name the file where they lie (results of an unfinished job: "
        "finish it first)",
    )


def _refused(path: str, name: str, expected: str) -> UserError:
    return UserError(f"prompt file {printable(path)}: {printable(name)}: expected {expected}")


def _values(dataset: h5py.Dataset, rows: slice) -> list[Any]:
    """Return rows of a dataset as Python values: text for strings, lists for arrays of variable length."""
    values = dataset[rows]
    if h5py.check_string_dtype(dataset.dtype):
        return [_decoded(value) for value in values.tolist()]
    return [v.tolist() if isinstance(v, np.ndarray) else v for v in values.tolist()]


def _decoded(value: Any) -> Any:
    """Return bytes of UTF-8 as text, and any other value unchanged."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _require_prompts(
    path: str, column: str | None, usable: Collection[str], present: Collection[str], unknown: UnknownFields
) -> None:
    """Raise UserError unless a usable column can hold the prompts; `present` are the columns of the table."""
    if column in usable or (column is None and any(unknown.reads(name) for name in usable)):
        return
    found = printable(", ".join(sorted(present)) or "none")
    flat = " (of one dimension: none)" if found != "none" and not usable else ""
    hint = "" if flat else flags_hint(present)
    raise UserError(
        f"prompt file {printable(path)}: expected a column {column or 'prompt'!r}, found {found}{flat}{hint}"
    )
