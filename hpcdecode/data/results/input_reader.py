"""Reads the input columns of rows from results files, whether they are packed or have datasets of their own."""

from __future__ import annotations

from typing import Any

import h5py
import msgspec
import numpy as np

from hpcdecode.data.prompts.columns import MISSING, TEXT, json_text, unpack
from hpcdecode.data.results.inputs import TOGETHER, InputColumn, InputColumns, dataset_name, native_values
from hpcdecode.data.results.layout import INPUTS, NOT_OWN, shown_name
from hpcdecode.data.results.strings import STRING

_TEXT = "prompt"  # names that no input column is shown under
_ALL = "input"


class InputReader:
    """Reads the input columns of an open results file.

    Args:
        file: The file.

    Attributes:
        packed: Whether the columns are packed, in `input_json` of the rows.
        names: What there is, by the names under which rows show it: the prompt as `prompt`, columns, or `input` for all
            of them if there are too many. None for the prompt and for `input`, which are no columns.
    """

    def __init__(self, file: h5py.File) -> None:
        self._file, self._inputs = file, InputColumns.of(file)
        self.packed = INPUTS in file["rows"]
        self.names: dict[str, str | None] = {_TEXT: None} if self._inputs.prompt else {}
        parsed = [name for name in NOT_OWN if name in file["rows"]]
        shown = {shown_name(name, parsed): name for name in self._inputs.columns}
        self.names |= {_ALL: None} if self._inputs.many else shown

    def column(self, shown: str) -> InputColumn | None:
        """Return what is known of a column by its shown name; None for those of JSON objects and for the prompt."""
        name = self.names[shown]
        return None if name is None else self._inputs.columns[name]

    def value_dtype(self, shown: str) -> Any:
        """Return the type of a column's values that are there; None if they have several, or are not native ones."""
        if shown == _TEXT:
            return STRING
        column = self.column(shown)
        return None if column is None else column._replace(kinds=column.kinds & ~MISSING).dtype

    def of_final(self, shown: str, index: np.ndarray) -> np.ndarray:
        """Return values of rows in a final file, [n] at the positions `index` [n]."""
        name = self.names[shown]
        if shown == _TEXT:
            values = native_values(pick(self._file["rows/prompt"], index), InputColumn(TEXT, 0, 0))
            return _array([text or None for text in values])
        path = TOGETHER if name is None else dataset_name(name)
        column = self.column(shown)
        values = native_values(pick(self._file[f"input/{path}"], index), column)
        return _array(values, column.dtype if column else None)

    def of_packed(self, names: list[str], packed: list[bytes]) -> dict[str, np.ndarray]:
        """Return values of packed rows, [n] each, by shown name."""
        rows = [unpack(row) for row in packed]
        found = {}
        for shown in names:
            name = self.names[shown]
            if shown == _TEXT:
                found[shown] = _array([prompt for prompt, _ in rows])
            elif name is None:
                objects = ({key: _plain(value) for key, value in columns.items()} for _, columns in rows)
                found[shown] = _array(list(objects))
            else:
                values = [_plain(columns.get(name)) for _, columns in rows]
                found[shown] = _array(values, self._inputs.columns[name].dtype)
        return found


def pick(dataset: Any, index: np.ndarray) -> np.ndarray:
    """Return elements of a dataset, [n] at the positions `index` [n], in one read if they are close together."""
    values: np.ndarray
    if len(index) == 0:
        values = dataset[0:0]
        return values
    first, last = int(index.min()), int(index.max())
    if last - first < 2 * len(index):
        values = dataset[first : last + 1][index - first]
        return values
    order = np.argsort(index)
    values = dataset[index[order]]
    out = np.empty_like(values)
    out[order] = values
    return out


def _plain(value: Any) -> Any:
    """Return an unpacked value as the Python value that its JSON text stands for."""
    return msgspec.json.decode(json_text(value)) if isinstance(value, msgspec.msgpack.Ext) else value


def _array(values: list[Any], dtype: Any = None) -> np.ndarray:
    """Return values as an array [n] of a native type of numbers, else of Python objects."""
    if dtype is None or dtype is STRING:
        return np.fromiter(values, object, len(values))
    return np.array(values, dtype)
