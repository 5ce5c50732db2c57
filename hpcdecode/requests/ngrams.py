"""Drafts by prompt lookup: what followed where the last tokens of a sequence occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROOM = 256  # tokens


class TokenHistory:
    """The tokens of a sequence in one array, which grows with it.

    Args:
        tokens: The first ones.
    """

    def __init__(self, tokens: Sequence[int]):
        self._memory = np.empty(len(tokens) + _ROOM, np.int32)
        self._count = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._count

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        end = self._count + len(tokens)
        if end > len(self._memory):
            memory = np.empty(2 * end, np.int32)
            memory[: self._count] = self.tokens
            self._memory = memory
        self._memory[self._count : end] = tokens
        self._count = end

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Return the tokens, int32 [n]."""
        return self._memory[: self._count]


def following(tokens: NDArray[np.int32], count: int, shortest: int, longest: int) -> list[int]:
    """Return `count` tokens that may follow, or none.

    The last occurrence of the longest run of last tokens is continued, and repeated if it is shorter than `count`.

    Args:
        tokens: Of a sequence, int32 [n].
        count: Tokens to return.
        shortest: Last tokens that must have occurred before.
        longest: Last tokens that are compared at most.
    """
    if count < 1 or not len(tokens):
        return []
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # of runs that are the same as the last tokens
    same = 1
    while same < longest and len(ends):
        within = ends[ends >= same]
        longer = within[tokens[within - same] == tokens[-1 - same]]
        if not len(longer):
            break
        ends, same = longer, same + 1
    if same < shortest or not len(ends):
        return []
    first = int(ends[-1]) + 1
    found: list[int] = tokens[first + np.arange(count) % (len(tokens) - first)].tolist()
    return found
