"""Tells the user about rows that cannot be used: the first few as they are found, all by their causes at the end."""

from __future__ import annotations

import logging
import re

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.report.text import table

SHOWN_ERRORS = 3
MAX_CAUSES = 64  # that are told apart
_SHOWN_CAUSES = 10
_CAUSE_CHARACTERS = 160
_OTHERS = "other causes"
_FILE = re.compile(r".+?:\d+: ")  # where a row of several files is
_VALUE = re.compile(r'"(?:[^"\\]|\\.)*"?|(?<![\w-])-?\d+(?:\.\d+)?')  # not the number of UTF-8
logger = logging.getLogger(__name__)


class RowErrors:
    """Counts the rows of a run that cannot be used by their causes.

    Args:
        several: Whether there are several prompt files, so that reasons begin with the file's name.
    """

    def __init__(self, several: bool = False) -> None:
        self._several = several
        self._shown = 0
        self._causes: dict[str, list[int]] = {}  # number of rows, and the first line

    def add(self, error: RowError) -> None:
        """Count a row, and log the first SHOWN_ERRORS."""
        if self._shown < SHOWN_ERRORS:
            logger.warning(f"hpcdecode: row error: line {error.line}: {error.reason}")
        elif self._shown == SHOWN_ERRORS:
            logger.warning("hpcdecode: more row errors are not shown one by one; their causes follow at the end")
        self._shown = min(self._shown + 1, SHOWN_ERRORS + 1)
        cause = cause_of(error.reason, self._several)
        if cause not in self._causes and len(self._causes) >= MAX_CAUSES:
            cause = _OTHERS
        found = self._causes.setdefault(cause, [0, error.line])
        found[0] += 1
        found[1] = min(found[1], error.line)

    def summary(self, earlier: int = 0) -> str:
        """Return a table of the causes, the most frequent first; an empty text if there are none.

        Args:
            earlier: Number of errors of earlier runs, which are not among them.
        """
        if not self._causes:
            return ""
        ordered = sorted(self._causes.items(), key=lambda item: (item[0] == _OTHERS, -item[1][0], item[1][1]))
        rows = [(f"{count:,}", f"{line:,}", cause) for cause, (count, line) in ordered[:_SHOWN_CAUSES]]
        more = sum(count for _, (count, _) in ordered[_SHOWN_CAUSES:])
        title = "row errors by cause" + f" ({earlier:,} of earlier runs not among them)" * bool(earlier) + ":"
        lines = [title, table(("rows", "first line", "cause"), rows)]
        return "\n".join([*lines, *([f"{more:,} more, of {len(ordered) - _SHOWN_CAUSES} causes"] if more else [])])


def cause_of(reason: str, several: bool = False) -> str:
    """Return a reason without what differs from row to row: indices, and the values that it was got.

    Args:
        reason: The reason of a row's error.
        several: Whether reasons may begin with `FILE:LINE: `.
    """
    place = _FILE.match(reason) if several else None
    text = re.sub(r"\[\d+\]", "[N]", reason[place.end() :] if place else reason)
    at = text.find(", got")
    if at >= 0:
        text = text[:at] + _VALUE.sub(lambda found: '"..."' if found[0][0] == '"' else "N", text[at:])
    return text if len(text) <= _CAUSE_CHARACTERS else text[: _CAUSE_CHARACTERS - 3] + "..."
