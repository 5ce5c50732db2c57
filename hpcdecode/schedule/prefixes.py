"""Beginnings that the prompts of a lane share: found as rows are admitted, prefilled once, held while they are used.

The S-rank sends a prefix to the R-ranks as it sends a prompt, but to all of them; sequences fork from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hpcdecode.requests.prefix import Prefix

MOST = 8  # prefixes of a lane at once
_BLOCKS = 2  # the shortest
_RECENT = 64  # prompts that others are compared with


class Prefixes:
    """The prefixes of a lane. most_tokens: of all of them together."""

    def __init__(self, block_tokens: int, most_tokens: int):
        self.block_tokens, self.most_tokens = block_tokens, most_tokens
        self.live: list[Prefix] = []
        self._least = _BLOCKS * block_tokens
        self._recent: deque[np.ndarray] = deque(maxlen=_RECENT)

    def find(self, input_ids: Sequence[int]) -> tuple[Prefix | None, int]:
        """The longest prefix of a prompt, and the length of a longer one that is worth making; 0 if there is none."""
        if not self.most_tokens or len(input_ids) <= self._least:
            return None, 0
        ids = np.array(input_ids, np.int32)
        known = max((p for p in self.live if p.begins(ids)), key=lambda p: p.prompt_length, default=None)
        length = min(max((_common(ids, other) for other in self._recent), default=0), len(ids) - 1)
        length -= length % self.block_tokens
        if length < (known.prompt_length if known else 0) + self._least or (known and not known.complete):
            return known, 0
        tokens = sum(p.prompt_length for p in self.live)
        return known, length if len(self.live) < MOST and tokens + length <= self.most_tokens else 0

    def remember(self, input_ids: Sequence[int]) -> None:
        """Prompts to come may share the beginning of this one."""
        if self.most_tokens and len(input_ids) > self._least:
            self._recent.append(np.array(input_ids, np.int32))

    def add(self, prefix: Prefix) -> None:
        self.live.append(prefix)
        if prefix.prefix:
            prefix.prefix.users += 1

    def drop_unused(self) -> list[Prefix]:
        """Forget the prefixes that nothing uses; returns them."""
        unused = []
        for prefix in reversed(self.live):  # those that begin with another come after it
            if not prefix.users:
                prefix.live = False
                unused.append(prefix)
                if prefix.prefix:
                    prefix.prefix.users -= 1
        self.live = [p for p in self.live if p.live]
        return unused


def _common(ids: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(ids), len(other))
    different = np.flatnonzero(ids[:length] != other[:length])
    return int(different[0]) if len(different) else length
