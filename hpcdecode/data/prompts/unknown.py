"""Warnings about unknown fields of rows: each name is reported once, with the known name that it resembles."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hpcdecode.data.prompts.kept import Selection
from hpcdecode.requests.values import MAX_SHOWN_CHARACTERS, nearest, printable, suggestion

MAX_WARNINGS = 20
_MAX_COLUMNS = 1000  # unknown names that are examined
_RESULTS_COLUMN = "finish_reason"  # a table with this column holds results of a job: its other columns are no mistakes

logger = logging.getLogger(__name__)


def warn(text: str) -> None:
    """Log a warning."""
    logger.warning(f"hpcdecode: warning: {printable(text)}")


class UnknownFields:
    """Warns once for each unknown name of a field, up to MAX_WARNINGS names.

    Args:
        known: Names of fields that have a meaning.
        offered: Those of them that a warning may suggest.
        kept: The columns that are kept whatever they mean; there are no warnings about them unless they resemble
            a known name. None keeps none.
        every: Whether a template reads columns of any name.

    Attributes:
        quiet: Whether nothing is said.
    """

    def __init__(
        self, known: frozenset[str], offered: frozenset[str], kept: Selection | None = None, *, every: bool = False
    ):
        self.known, self.kept, self.quiet = known, kept, False
        self._every = every
        self._offered = sorted(offered)
        self._seen: set[str] = set()
        self._columns: dict[str, bool] = {}  # what `_is_column` has found

    def reads(self, name: str) -> bool:
        """Return whether a column has a meaning."""
        return self._every or name in self.known

    def keeps(self, name: str) -> bool:
        """Return whether a column is kept whatever it means."""
        return self.kept is not None and self.kept.keeps(name)

    def tell(self, text: str) -> None:
        """Log a warning about the rows."""
        if not self.quiet:
            warn(text)

    def row(self, place: str, names: Iterable[str]) -> None:
        """Warn about unknown fields of a row.

        Args:
            place: Where the row is, such as `line 3`.
            names: Names of its fields.
        """
        for name in names:
            if name in self.known or name in self._seen or len(self._seen) > MAX_WARNINGS:
                continue
            if not self._is_column(name):
                self._warn(place, "field", name)

    def columns(self, path: str, names: Iterable[str]) -> None:
        """Warn about columns of a table whose names resemble a known one."""
        names = list(names)
        for name in names if _RESULTS_COLUMN not in names else ():
            if name not in self.known and nearest(name, self._offered):
                self._warn(path, "column", name)

    def _is_column(self, name: str) -> bool:
        """Return whether an unknown name is that of a column to keep, and no misspelt field."""
        if name not in self._columns and len(self._columns) < _MAX_COLUMNS:
            self._columns[name] = (self._every or self.keeps(name)) and not nearest(name, self._offered)
        return self._columns.get(name, True)

    def _warn(self, place: str, what: str, name: str) -> None:
        if len(self._seen) == MAX_WARNINGS:
            self.tell(f"{place}: more fields are not known; they are ignored without a warning")
        elif len(self._seen) < MAX_WARNINGS:
            hint = suggestion(name, self._offered)
            use = "kept as a column" if self.keeps(name) else "ignored"
            self.tell(f"{place}: {what} {name[:MAX_SHOWN_CHARACTERS]!r} is not known and {use}{hint}")
        self._seen.add(name)
