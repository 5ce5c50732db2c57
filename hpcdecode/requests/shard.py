"""A job's share of the rows of its prompt files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Self


class Shard(msgspec.Struct, frozen=True):
    """One of several jobs that share the rows of their prompt files.

    Attributes:
        index: Remainder of the shard's lines, modulo `count`.
        count: Number of shards.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shard that a text such as `0/4` names, or raise ValueError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if not match or not int(match[1]) < int(match[2]):
            raise ValueError(f"expected I/N with 0 <= I < N, such as 0/4, got {text!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, line: int) -> bool:
        """Return whether the shard has the row of a line."""
        return line % self.count == self.index
