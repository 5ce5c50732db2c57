"""Warnings about rows that can be used and may be mistaken: unknown roles of messages, and ids that repeat."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from hpcdecode.data.prompts.unknown import MAX_WARNINGS
from hpcdecode.requests.values import shown, suggestion

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OF_SOME_TEMPLATES = frozenset(("ipython", "observation", "context", "documents", "control"))
_SYNONYMS = {"human": "user", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "model": "assistant"}
MAX_IDS = 1 << 18  # that are remembered
_FIRST_SLOTS = 1 << 10
_SHOWN_IDS = 3


class UnknownRoles:
    """Warns once for each role of messages that is not known, up to MAX_WARNINGS roles.

    Args:
        tell: Logs a warning.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._seen = {*ROLES, *_OF_SOME_TEMPLATES}
        self._left = MAX_WARNINGS

    def row(self, place: str, messages: list[dict[str, Any]]) -> None:
        """Warn about unknown roles of a row's messages; `place` says where the row is, such as `line 3`."""
        for index, message in enumerate(messages):
            role = message["role"]
            if role in self._seen or self._left == 0:
                continue
            self._seen.add(role)
            self._left -= 1
            meant = _SYNONYMS.get(role.lower())
            hint = f"; did you mean {meant!r}?" if meant else suggestion(role, ROLES)
            hint = hint or f"; most chat templates know {', '.join(ROLES[:1] + ROLES[2:5])}"
            self._tell(f"{place}: messages[{index}].role {shown(role)} is not known{hint}")


class RepeatedIds:
    """Warns about ids that several rows have.

    The first MAX_IDS different ids are remembered as hashes of 64 bits, in at most 8 MiB; later ones are only compared
    with them.

    Args:
        tell: Logs a warning.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._count = self._repeated = 0
        self._slots = _FIRST_SLOTS
        self._hashes, self._lines = _zeros(self._slots), _zeros(self._slots)  # open addressing; 0 is a free slot

    def row(self, line: int, row_id: str) -> None:
        """Warn if an earlier row has the same id."""
        if self._repeated > _SHOWN_IDS:
            return
        key = hash(row_id) & 0xFFFFFFFFFFFFFFFF or 1
        slot = self._slot(key)
        if self._hashes[slot] == key:
            self._repeated += 1
            if self._repeated > _SHOWN_IDS:
                self._tell(f"line {line}: more ids repeat, which is not said again")
            else:
                self._tell(f"line {line}: id {shown(row_id)} is that of line {self._lines[slot]}, too")
        elif self._count < MAX_IDS:
            self._hashes[slot], self._lines[slot] = key, line
            self._count += 1
            if 2 * self._count > self._slots and self._slots < 2 * MAX_IDS:
                self._grow()

    def _slot(self, key: int) -> int:
        """Return the slot of a hash, or the free one where it belongs."""
        slots, hashes = self._slots, self._hashes
        slot = key % slots
        while hashes[slot] not in (0, key):
            slot = (slot + 1) % slots
        return slot

    def _grow(self) -> None:
        hashes, lines = self._hashes, self._lines
        self._slots *= 2
        self._hashes, self._lines = _zeros(self._slots), _zeros(self._slots)
        for key, line in zip(hashes, lines, strict=True):
            if key:
                slot = self._slot(key)
                self._hashes[slot], self._lines[slot] = key, line


def _zeros(count: int) -> array[int]:
    return array("Q", bytes(8 * count))
