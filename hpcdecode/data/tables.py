"""Rows of tables: Parquet files, and 1-D datasets of HDF5 files (the results of another job among them)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import h5py

from hpcdecode.errors import UserError

TABLES = (".parquet", ".h5", ".hdf5")
_ROWS = 1024  # read at once


def table_rows(path: str, column: str | None, known: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Rows of a table as dicts of Python values.

    column: the column of the prompts; in HDF5 the path of its dataset, whose neighbours are the other columns. None
    where the columns have the names that rows of JSON have. known: the columns that are read beside it.
    Raises UserError where there is no such column; what the readers raise where the file is broken.
    """
    read = _parquet if path.endswith(".parquet") else _hdf5
    return read(path, column, known)


def optional(module: str, path: str, extra: str) -> Any:
    """The module of an optional dependency, or a UserError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UserError(
            f"{path}: this format needs {module}, which is not installed: pip install 'hpcdecode[{extra}]'"
        ) from e


def _parquet(path: str, column: str | None, known: frozenset[str]) -> Iterator[dict[str, Any]]:
    file = optional("pyarrow.parquet", path, "parquet").ParquetFile(path)
    names = file.schema_arrow.names
    _require_prompts(path, column, known, names)
    for batch in file.iter_batches(_ROWS, columns=[n for n in names if n == column or n in known]):
        yield from batch.to_pylist()


def _hdf5(path: str, column: str | None, known: frozenset[str]) -> Iterator[dict[str, Any]]:
    with h5py.File(path, locking=False) as file:
        folder, _, own = (column or "").rpartition("/")
        group = file.get(folder or "/")
        present = _datasets(group) if isinstance(group, h5py.Group) else {}
        _require_prompts(path, own or None, known, list(present), column)
        columns = {name: data for name, data in present.items() if name == own or name in known}
        length = len(columns[own] if own else next(iter(columns.values())))
        columns = {column if name == own else name: data for name, data in columns.items() if len(data) == length}
        for start in range(0, length, _ROWS):
            values = [_values(data, start) for data in columns.values()]
            for row in zip(*values, strict=True):
                yield dict(zip(columns, row, strict=True))


def _datasets(group: h5py.Group) -> dict[str, h5py.Dataset]:
    return {name: item for name, item in group.items() if isinstance(item, h5py.Dataset) and item.ndim == 1}


def _values(dataset: h5py.Dataset, start: int) -> list[Any]:
    """A stretch as Python values: text for strings, lists for arrays of variable length."""
    if h5py.check_string_dtype(dataset.dtype):
        return dataset.asstr(errors="replace")[start : start + _ROWS].tolist()
    values = dataset[start : start + _ROWS]
    return [v.tolist() for v in values] if values.dtype == object else values.tolist()


def _require_prompts(
    path: str, column: str | None, known: frozenset[str], present: Seq[str], shown: str | None = None
) -> None:
    if column in present or (column is None and any(name in known for name in present)):
        return
    raise UserError(
        f"prompt file {path}: expected a column {shown or column or 'prompt'!r}, found "
        f"{', '.join(sorted(present)) or 'none'}; name the column of the prompts with --prompt-column"
    )
