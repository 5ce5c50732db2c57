"""Keeps the input columns of rows from when they are read until their results are written (`--keep-columns`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from hpcdecode.data.prompts.columns import pack, pack_columns
from hpcdecode.errors import UserError
from hpcdecode.requests.values import is_integer, printable

ALL, NONE = ("all",), ("none",)
SEARCHED_ROWS = 100  # of each file, for the names of columns
_PROMPT = "prompt"
_SHOWN_NAMES = 100


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a text that commas divide, without spaces around them, or raise ValueError if it is empty."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError("expected all, none or names of columns, got nothing")
    return names


class Selection:
    """The columns that a job keeps.

    Args:
        names: Their names, ALL or NONE. `prompt` is the text that the model is given.
        column: Name of the prompts' column; None for `prompt`.
    """

    def __init__(self, names: Sequence[str], column: str | None = None) -> None:
        self.all, self.column = tuple(names) == ALL, column or _PROMPT
        self.names = frozenset() if self.all or tuple(names) == NONE else frozenset(names)
        self.prompt = self.all or not self.names.isdisjoint((_PROMPT, self.column))
        self.any = self.all or bool(self.names)

    def keeps(self, name: str) -> bool:
        """Return whether a column is kept."""
        return self.all or name in self.names

    def lacks(self, found: Collection[str]) -> list[str]:
        """Return the names that are not among the columns that were found."""
        return sorted(self.names.difference(found, (_PROMPT, self.column)))

    def require(self, found: Collection[str]) -> None:
        """Raise UserError unless all names are among the columns that were found."""
        if lacking := self.lacks(found):
            columns = printable(", ".join(islice(found, _SHOWN_NAMES)) or "none")
            raise UserError(f"--keep-columns: expected all, none, or some of {columns}; got {printable(lacking[0])}")


class KeptColumns:
    """The columns of rows that are read and not finished, packed.

    One thread reads rows, another one takes their columns.

    Args:
        selection: The columns to keep.
        search: Whether the names of the selection have yet to be found among the first rows.
    """

    def __init__(self, selection: Selection, *, search: bool = False) -> None:
        self.selection = selection
        self._columns: dict[int, bytes] = {}  # by line, as the next one
        self._prompts: dict[int, str] = {}
        self._searching = search and bool(selection.names)
        self._rows = 0  # that were searched
        self._found: dict[str, None] = {}  # names of columns

    def read(self, line: int, fields: dict[str, Any], known: Collection[str] = ()) -> None:
        """Keep the columns of a row that has been read, but for its id, which the results have anyway.

        Args:
            line: Of the row.
            fields: Of the row.
            known: Names of others that the results have anyway; they are kept if the selection names them.

        Raises:
            RowProblem: A value is nested too deeply.
            UserError: A column of the selection is in none of the first rows.
        """
        if self._searching:
            self._search(fields)
        selection, left_out = self.selection, _id_field(fields)
        own = {k: v for k, v in fields.items() if k != left_out and selection.keeps(k)}
        own = {k: v for k, v in own.items() if k not in known or k in selection.names} if known else own
        if isinstance(text := fields.get(selection.column), str):
            own.pop(selection.column, None)
            self.prompt(line, text)
        self._columns[line] = pack_columns(own)

    def prompt(self, line: int, text: str) -> None:
        """Keep the text of a row's prompt."""
        if self.selection.prompt:
            self._prompts[line] = text

    def end(self) -> None:
        """Say that there are no more rows. Raises UserError as `read` does."""
        if self._searching and self._found:
            self.selection.require(self._found)

    def size(self, line: int) -> int:
        """Return about how many bytes are kept for a row."""
        return len(self._columns.get(line, b"")) + len(self._prompts.get(line, ""))

    def take(self, line: int) -> bytes:
        """Return the packed columns of a row and forget them; empty if there are none."""
        columns, prompt = self._columns.pop(line, None), self._prompts.pop(line, None)
        return b"" if columns is None else pack(prompt, columns)

    def _search(self, fields: dict[str, Any]) -> None:
        self._found.update(dict.fromkeys(fields))
        self._rows += 1
        if self.selection.lacks(self._found):
            if self._rows >= SEARCHED_ROWS:
                self.selection.require(self._found)
        else:
            self._searching = False


def _id_field(fields: dict[str, Any]) -> str | None:
    """Return the name of the field that is the row's id, or None."""
    name = "id" if fields.get("id") is not None else "custom_id"
    value = fields.get(name)
    return name if isinstance(value, str) or is_integer(value) else None
