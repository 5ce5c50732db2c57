"""Fields that mean nothing here: each is named once, with the known field that it may stand for."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

from hpcdecode.data.prompts.values import MAX_SHOWN_CHARACTERS, printable

MAX_WARNINGS = 20
_LIKENESS = 0.8
_RESULTS = "finish_reason"  # a column that tells a table of results of another job, whose columns are meant to be there


def warn(text: str) -> None:
    """Print a warning to standard error."""
    print(f"hpcdecode: warning: {printable(text)}", file=sys.stderr, flush=True)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`, or None if there is none near."""
    like = name[:MAX_SHOWN_CHARACTERS].lower().replace("-", "_")
    found = difflib.get_close_matches(like, known, 1, _LIKENESS)
    return found[0] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'NAME'?`, or nothing."""
    found = nearest(name, known)
    return f"; did you mean {found!r}?" if found else ""


class UnknownFields:
    """Warns once for every name of a field that is not known, up to MAX_WARNINGS.

    Args:
        known: names that mean something.
        offered: those of them that an unknown name may stand for.
    """

    def __init__(self, known: frozenset[str], offered: frozenset[str]):
        self.known = known
        self._offered = sorted(offered)
        self._seen: set[str] = set()

    def row(self, place: str, names: Iterable[str]) -> None:
        """Look at the names of a row's fields. place: of the row, such as `line 3`."""
        for name in names:
            if name not in self.known and name not in self._seen and len(self._seen) <= MAX_WARNINGS:
                self._warn(place, "field", name)

    def columns(self, path: str, names: Iterable[str]) -> None:
        """Look at a table's columns; only names that are like a known one are told."""
        names = list(names)
        for name in names if _RESULTS not in names else ():
            if name not in self.known and nearest(name, self._offered):
                self._warn(path, "column", name)

    def _warn(self, place: str, what: str, name: str) -> None:
        if len(self._seen) == MAX_WARNINGS:
            warn(f"{place}: more fields are not known; they are ignored without a warning")
        elif len(self._seen) < MAX_WARNINGS:
            hint = suggestion(name, self._offered)
            warn(f"{place}: {what} {name[:MAX_SHOWN_CHARACTERS]!r} is not known and ignored{hint}")
        self._seen.add(name)
