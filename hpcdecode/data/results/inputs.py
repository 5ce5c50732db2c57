"""The input columns of rows in results files: their names, their types, and the datasets of final files.

In segments and in the index, `input_offsets` and `input_json` of /rows have packed rows (see prompts/columns.py). A
final file has /rows/prompt and /input/NAME instead, with the native type of the column if all its values agree, else
JSON text. The attribute `columns` of /input lists the columns of either with the kinds of their values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import h5py
import msgspec
import numpy as np

from hpcdecode.data.prompts.columns import (
    ALL_KINDS,
    BOOL,
    FLOAT,
    INT,
    LONG,
    MISSING,
    TEXT,
    json_text,
    kind_of,
    pack,
    pack_columns,
    unpack,
)
from hpcdecode.data.results.strings import STRING, objects, utf8

MAX_COLUMNS = 512  # of more columns, or longer names, all columns lie in one dataset as JSON objects
MAX_NAME_CHARACTERS = 1000
TOGETHER = "%columns"  # its name; no other encoded name has % before a letter that is no hexadecimal digit
_MAX_NAME_BYTES = 200
_ATTRIBUTE = "columns"  # name of the attribute
_NATIVE: tuple[tuple[int, Any], ...] = (
    (BOOL, np.dtype("?")),
    (INT | LONG, np.dtype("i8")),
    (INT | FLOAT, np.dtype("f8")),
    (TEXT, STRING),
)


class InputColumn(NamedTuple):
    """What is known of a column.

    Attributes:
        kinds: Kinds of its values, joined bit by bit.
        line: First line that has it.
        place: Its place among the columns of that line.
    """

    kinds: int
    line: int
    place: int

    @property
    def dtype(self) -> Any:
        """Type of its dataset; None for JSON text."""
        return next((dtype for kinds, dtype in _NATIVE if self.kinds and not self.kinds & ~kinds), None)


class InputColumns(NamedTuple):
    """The input columns of some rows.

    Attributes:
        rows: Number of the rows.
        prompt: Whether one of them has the text of its prompt.
        many: Whether there are more than MAX_COLUMNS columns, or longer names, and the columns are not listed.
        columns: The columns by name, in the order of the rows.
    """

    rows: int
    prompt: bool
    many: bool
    columns: dict[str, InputColumn]

    @property
    def any(self) -> bool:
        """Whether there is something to show."""
        return self.prompt or self.many or bool(self.columns)

    @staticmethod
    def of_rows(lines: Sequence[int], packed: Iterable[bytes]) -> InputColumns:
        """Return the columns of packed rows."""
        kinds: dict[str, int] = {}
        counts: dict[str, int] = {}
        first: dict[str, tuple[int, int]] = {}
        prompt, rows = False, 0
        for line, row in zip(lines, packed, strict=True):
            text, columns = unpack(row)
            prompt, rows = prompt or text is not None, rows + 1
            for name, value in columns.items():
                kinds[name] = kinds.get(name, 0) | kind_of(value)
                counts[name] = counts.get(name, 0) + 1
            if not columns.keys() <= first.keys():
                for place, name in enumerate(columns):
                    first.setdefault(name, (line, place))
        found = {
            name: InputColumn(kind | (MISSING if counts[name] < rows else 0), *first[name])
            for name, kind in kinds.items()
        }
        return _ordered(rows, prompt, False, found)

    @staticmethod
    def sum(parts: Sequence[InputColumns]) -> InputColumns:
        """Return the columns of all rows of these."""
        filled = [part for part in parts if part.rows]
        names = {name for part in filled for name in part.columns}
        found = {}
        for name in names:
            held = [part.columns[name] for part in filled if name in part.columns]
            kinds = 0 if len(held) == len(filled) else MISSING
            for column in held:
                kinds |= column.kinds
            found[name] = InputColumn(kinds, *min(column[1:] for column in held))
        many = any(part.many for part in filled)
        return _ordered(sum(p.rows for p in parts), any(p.prompt for p in filled), many, found)

    @staticmethod
    def of(file: h5py.File) -> InputColumns:
        """Return the columns of an open file.

        Raises:
            ValueError: What the file says of them is damaged.
        """
        rows = len(file["rows/line"])
        if "input" not in file:
            return InputColumns(rows, False, False, {})
        prompt, many, listed = msgspec.json.decode(file["input"].attrs[_ATTRIBUTE], type=_Listed)
        columns = {name: InputColumn(kinds & ALL_KINDS, line, place) for name, kinds, line, place in listed}
        return InputColumns(rows, prompt, many, columns)

    def write_to(self, file: h5py.File) -> None:
        """Write what is known of the columns, unless there are none."""
        if self.any:
            listed = [(name, *column) for name, column in self.columns.items()]
            text = msgspec.json.encode((self.prompt, self.many, listed)).decode()
            file.require_group("input").attrs[_ATTRIBUTE] = text


_Listed = tuple[bool, bool, list[tuple[str, int, int, int]]]


def _ordered(rows: int, prompt: bool, many: bool, columns: dict[str, InputColumn]) -> InputColumns:
    many = many or len(columns) > MAX_COLUMNS or any(len(name) > MAX_NAME_CHARACTERS for name in columns)
    order = [] if many else sorted(columns, key=lambda name: (*columns[name][1:], name))
    return InputColumns(rows, prompt, many, {name: columns[name] for name in order})


def dataset_name(name: str) -> str:
    """Return the name of a column's dataset in /input.

    `/`, `%`, NUL, a `.` at the beginning and an empty name are written as `%` and two hexadecimal digits of each byte,
    or `%` alone. A long name is cut, and ends with `%~` and a hash of the whole name.
    """
    text = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    text = "%2E" + text[1:] if text.startswith(".") else text or "%"
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= _MAX_NAME_BYTES:
        return encoded.decode()
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:16]
    return encoded[:_MAX_NAME_BYTES].decode(errors="ignore") + "%~" + digest


class InputWriter:
    """Writes the input columns of a final file.

    Args:
        file: The open file.
        inputs: The columns of all its rows.
        create: Creates a dataset of the file by its name, number of entries and type, and returns it.
    """

    def __init__(self, file: h5py.File, inputs: InputColumns, create: Any) -> None:
        self._inputs = inputs
        inputs.write_to(file)
        self._prompts = create(file, "rows/prompt", inputs.rows, STRING) if inputs.prompt else None
        self._together = create(file, f"input/{TOGETHER}", inputs.rows, STRING) if inputs.many else None
        self._columns = {}
        for name, column in inputs.columns.items():
            dataset = create(file, f"input/{dataset_name(name)}", inputs.rows, column.dtype or STRING)
            dataset.attrs["name"] = name.replace("\0", "\ufffd")
            dataset.attrs["json"] = column.dtype is None
            self._columns[name] = dataset

    def append(self, start: int, packed: Sequence[bytes]) -> None:
        """Write packed rows from the row `start` on."""
        if not self._inputs.any or not packed:
            return
        rows = [unpack(row) for row in packed]
        place = slice(start, start + len(rows))
        if self._prompts is not None:
            self._prompts[place] = objects([utf8(prompt or "") for prompt, _ in rows])
        if self._together is not None:
            texts = ({name: msgspec.Raw(json_text(v)) for name, v in columns.items()} for _, columns in rows)
            self._together[place] = objects([msgspec.json.encode(text) for text in texts])
        for name, column in self._inputs.columns.items():
            values = [columns.get(name) for _, columns in rows]
            self._columns[name][place] = _stored(values, column.dtype)


def _stored(values: list[Any], dtype: Any) -> np.ndarray:
    if dtype is None:
        return objects([json_text(value) for value in values])
    return objects([utf8(value) for value in values]) if dtype is STRING else np.array(values, dtype)


def final_datasets(inputs: InputColumns) -> dict[str, Any]:
    """Return the types of the datasets of a final file with these columns by their paths."""
    found = {"rows/prompt": STRING} if inputs.prompt else {}
    found |= {f"input/{TOGETHER}": STRING} if inputs.many else {}
    return found | {f"input/{dataset_name(n)}": column.dtype or STRING for n, column in inputs.columns.items()}


def native_values(values: np.ndarray, column: InputColumn | None) -> list[Any]:
    """Return entries of a dataset of a final file as Python values; `column` is None for JSON text.

    Raises:
        ValueError: The JSON text is damaged.
    """
    if column is None or column.dtype is None:
        return [msgspec.json.decode(text) for text in values.tolist()]
    return [v.decode("utf-8", "replace") for v in values.tolist()] if column.dtype is STRING else values.tolist()


def packed_rows(file: h5py.File, inputs: InputColumns, rows: slice) -> list[bytes]:
    """Return rows of a final file packed."""
    if not inputs.any:
        return [b""] * len(range(*rows.indices(inputs.rows)))
    count = len(range(*rows.indices(inputs.rows)))
    prompts: list[str | None] = [None] * count
    if inputs.prompt:
        prompts = [text.decode("utf-8", "replace") or None for text in file["rows/prompt"][rows].tolist()]
    if inputs.many:
        columns = native_values(file[f"input/{TOGETHER}"][rows], None)
    else:
        values = [native_values(file[f"input/{dataset_name(n)}"][rows], c) for n, c in inputs.columns.items()]
        names = list(inputs.columns)
        columns = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] or [{}] * count
    return [pack(prompt, pack_columns(own)) for prompt, own in zip(prompts, columns, strict=True)]


def split(entries: np.ndarray | None, lengths: np.ndarray) -> list[bytes]:
    """Return the packed rows that lie one after another in `entries` [sum of lengths] uint8; None has none."""
    if entries is None:
        return [b""] * len(lengths)
    data, ends = entries.tobytes(), np.cumsum(lengths).tolist()
    return [data[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
