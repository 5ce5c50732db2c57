"""Checks the members of results files, which are untrusted input: where they lie, their types and their sizes."""

from __future__ import annotations

import os
from typing import Any

import h5py
import numpy as np

from hpcdecode.data.results.layout import FINISH, FINISH_REASONS, Column
from hpcdecode.data.results.strings import STRING

_FILTERS = (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32)
_MAX_RATIO = 1100  # of a dataset's size to the bytes stored; deflate reaches 1,032
_MAX_CHUNK_BYTES = 1 << 28


class Unsound(Exception):
    """A file does not have the structure of a results file."""


def member(group: h5py.Group, name: str, kind: type) -> Any:
    """Return a member of a group. Raises Unsound unless it is of this kind and in the same file."""
    link = group.get(name, getlink=True)
    if link is None:
        raise Unsound(f"it has no {group.name.strip('/')}/{name}".replace("no /", "no "))
    if not isinstance(link, h5py.HardLink):
        raise Unsound(f"{name} is a link to somewhere else")
    member = group[name]
    if not isinstance(member, kind):
        raise Unsound(f"{name} is no {kind.__name__.lower()}")
    return member


def require_type(dataset: h5py.Dataset, name: str, column: Column) -> None:
    """Raise Unsound unless a dataset has the type and the number of dimensions of its column."""
    if column.dtype is STRING:
        info = h5py.check_string_dtype(dataset.dtype)
        good = info is not None and info.length is None
    elif column.dtype is FINISH:
        good = h5py.check_enum_dtype(dataset.dtype) == FINISH_REASONS and dataset.dtype.itemsize == 1
    else:
        good = dataset.dtype.newbyteorder("=") == column.dtype
    if not good:
        raise Unsound(f"{name} is of type {dataset.dtype}")
    if dataset.ndim != (2 if column.wide else 1):
        raise Unsound(f"{name} has {dataset.ndim} dimensions")


def require_size(dataset: h5py.Dataset, name: str, file: h5py.File) -> None:
    """Raise Unsound if a dataset is in another file, or claims more values than its bytes can unpack to."""
    if dataset.is_virtual:
        return
    if dataset.external:
        raise Unsound(f"{name} lies in another file")
    settings = dataset.id.get_create_plist()
    if any(settings.get_filter(i)[0] not in _FILTERS for i in range(settings.get_nfilters())):
        raise Unsound(f"{name} is packed in an unknown way")
    itemsize = dataset.id.get_type().get_size()
    claimed, stored = dataset.size * itemsize, dataset.id.get_storage_size()
    if stored > os.path.getsize(file.filename) or claimed > stored * _MAX_RATIO:
        raise Unsound(f"{name} claims {claimed} bytes and has {stored}")
    if dataset.chunks and int(np.prod(dataset.chunks, dtype=object)) * itemsize > _MAX_CHUNK_BYTES:
        raise Unsound(f"{name} has chunks of {dataset.chunks}")
