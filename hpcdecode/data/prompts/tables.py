"""Reads the rows of tables: Parquet and Arrow files, and HDF5 files of 1-D datasets, such as another job's results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from hpcdecode.data.prompts.arrow import arrow_rows
from hpcdecode.data.prompts.columnar import batch_rows, decoded, optional, refused, require_prompts, used_columns
from hpcdecode.data.prompts.content import FileFormat
from hpcdecode.data.prompts.extras import import_extra
from hpcdecode.data.prompts.unknown import UnknownFields
from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable

_ROWS = 1024  # rows of an HDF5 file that are read at once
_PARQUET_ROWS = 128  # rows of a Parquet file that are decoded at once: small files may hold large values
_MAX_READ_BYTES = 64 << 20  # of an HDF5 dataset at once, and of each of its chunks, which HDF5 decodes whole
_MAX_RATIO = 2000  # of a column's size to the bytes stored; deflate reaches 1,032
_MAX_UNPACKED_BYTES = 1 << 30  # of a Parquet column chunk that exceeds this ratio


def table_rows(form: FileFormat, path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    """Return an iterator over the rows of a table, as dicts of Python values by column.

    Args:
        form: Format of the file, which is a table.
        path: Path of the file.
        column: Column of the prompts. In HDF5 this is the path of a dataset; the other columns are in the same group.
            None if the columns have the names of the fields of JSON rows.
        unknown: Knows the names of the other columns to read.

    Raises:
        UserError: There is no such column, or its data are in another file.
        Exception: The file is broken; pyarrow and h5py raise exceptions of many types.
    """
    readers = {FileFormat.PARQUET: _parquet, FileFormat.ARROW: arrow_rows, FileFormat.HDF5: _hdf5}
    return readers[form](path, column, unknown)


def _parquet(path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    file = import_extra("pyarrow.parquet", path, "parquet").ParquetFile(path)
    implausible = _implausible(file.metadata)

    def check(name: str) -> None:
        for place, got in implausible.items():
            if place == name or place.startswith(name + "."):
                raise refused(path, name, f"a column of prompts, got {got}")

    used = used_columns(path, file.schema_arrow.names, column, unknown, check)
    for batch in file.iter_batches(_PARQUET_ROWS, columns=used):
        yield from batch_rows(batch, unknown.known)


def _implausible(metadata: Any) -> dict[str, str]:
    """Return the columns, by path, that claim a far greater size than their stored bytes can unpack to, and what."""
    found = {}
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            size, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
            if size > max(_MAX_UNPACKED_BYTES, _MAX_RATIO * stored):
                found[chunk.path_in_schema] = f"{size} bytes of which {stored} are stored"
    return found


def _hdf5(path: str, column: str | None, unknown: UnknownFields) -> Iterator[dict[str, Any]]:
    with h5py.File(path, locking=False, rdcc_nbytes=_MAX_READ_BYTES) as file:
        folder, _, own = (column or "").rpartition("/")
        group = _group(path, file, folder)
        present = [] if group is None else list(group)
        names = [name for name in present if name == own or unknown.reads(name)]
        columns = {name: data for name in names if (data := _dataset(path, group, name)) is not None}
        for name in present:
            if name not in names and unknown.keeps(name):
                with optional(unknown):
                    if (data := _dataset(path, group, name)) is not None:
                        columns[name] = data
        called = {own: column} if column else {}  # the prompt's dataset goes by its path
        usable = [called.get(name, name) for name in columns if name in names]
        require_prompts(path, column, usable, present, unknown)
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
    return refused(
        path,
        name,
        f"data that lie in this file itself, got {got}; name the file where they lie (results of an unfinished job: "
        "finish it first)",
    )


def _values(dataset: h5py.Dataset, rows: slice) -> list[Any]:
    """Return rows of a dataset as Python values: text for strings, lists for arrays of variable length."""
    values = dataset[rows]
    if h5py.check_string_dtype(dataset.dtype):
        return [decoded(value) for value in values.tolist()]
    return [v.tolist() if isinstance(v, np.ndarray) else v for v in values.tolist()]
