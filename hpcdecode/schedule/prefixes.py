"""Prefixes that the prompts of a lane share: found as rows are admitted, prefilled once, held while they are used.

The S-rank sends a prefix to the R-ranks as it sends a prompt, but to all of them; sequences fork from it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcdecode.requests.prefix import Prefix, remaining
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.spread import in_common

LEAST_PREFIXES = 64  # that a lane may hold at once
_BLOCKS = 2  # of the shortest
_RECENT = 64  # prompts that others are compared with


_Start = tuple[int, bytes]  # adapter, and what the shortest prefix has of ids: only what has the same may begin alike


class Match(NamedTuple):
    """The copies of the longest prefix of a prompt, and the tokens of a longer one that is worth making, or 0."""

    known: Sequence[Prefix]
    new_tokens: int


class Beginning(NamedTuple):
    """Tokens of a prompt to come that it may share, and its adapter; no tokens if they are not known."""

    ids: Sequence[int]
    adapter: int = -1


NOTHING = Beginning(())


def note_shared(sequences: Iterable[SequenceState], new: Iterable[Prefix]) -> int:
    """Note how many tokens of their prompts sequences share, when they enter; return the sum.

    Who comes first of those that share a new prefix is the one that it is prefilled for.

    Args:
        sequences: that enter.
        new: prefixes that are prefilled for them.
    """
    total, left = 0, {prefix.key: remaining(prefix) for prefix in new}
    for sequence in sequences:
        shared = sequence.prefilled - (left.pop(sequence.prefix.key, 0) if sequence.prefix else 0)
        request = sequence.request
        request.shortcuts = request.shortcuts.sharing(min(shared, len(request.prompt.token_ids)))
        total += shared
    return total


class Prefixes:
    """The prefixes of a lane.

    Args:
        block_tokens: tokens of a KV block.
        most_tokens: of all prefixes together; 0 shares none.
        most: prefixes at once.

    Attributes:
        live: those that are held; one that begins with another comes after it.
    """

    def __init__(self, block_tokens: int, most_tokens: int, most: int = LEAST_PREFIXES):
        self.block_tokens, self.most_tokens, self.most = block_tokens, most_tokens, most
        self.live: list[Prefix] = []
        self._least = _BLOCKS * block_tokens
        self._tokens = 0
        self._alike: defaultdict[_Start, list[Prefix]] = defaultdict(list)  # those that are held
        self._recent: deque[tuple[_Start, NDArray[np.int32]]] = deque(maxlen=_RECENT)

    def find(self, input_ids: Sequence[int], adapter: int = -1) -> Match:
        """Return what a prompt with an adapter, or -1 for none, can share."""
        if not self.most_tokens or len(input_ids) <= self._least:
            return Match((), 0)
        ids = np.array(input_ids, np.int32)
        start = self._start(ids, adapter)
        known, alike = self._longest(ids, adapter), (other for own, other in self._recent if own == start)
        length = min(max((in_common(ids, other) for other in alike), default=0), len(ids) - 1)
        length -= length % self.block_tokens
        if known and (length < known[0].prompt_length + self._least or not any(p.complete for p in known)):
            return Match(known, 0)
        return Match(known, length if length >= self._least and self.has_room(length) else 0)

    def has_room(self, tokens: int) -> bool:
        """Return whether a prefix of so many tokens may be held, too."""
        return len(self.live) < self.most and self._tokens + tokens <= self.most_tokens

    def copies(self, input_ids: Sequence[int], adapter: int) -> list[Prefix]:
        """Return the prefixes with these ids and an adapter, or -1 for none."""
        ids = np.array(input_ids, np.int32)
        return [p for p in self._alike.get(self._start(ids, adapter), ()) if p.equals(ids, adapter)]

    def shorter(self, input_ids: Sequence[int], adapter: int) -> list[Prefix]:
        """Return the complete prefixes that longer ids begin with, the longest first."""
        ids = np.array(input_ids, np.int32)
        alike = self._alike.get(self._start(ids, adapter), ())
        found = (p for p in alike if p.complete and p.begins(ids, adapter))
        return sorted(found, key=lambda p: p.prompt_length, reverse=True)

    def remember(self, input_ids: Sequence[int], adapter: int = -1) -> None:
        """Compare prompts to come with this one, which has an adapter, or -1 for none."""
        if self.most_tokens and len(input_ids) > self._least:
            ids = np.array(input_ids, np.int32)
            self._recent.append((self._start(ids, adapter), ids))

    def add(self, prefix: Prefix) -> None:
        """Hold a prefix."""
        self.live.append(prefix)
        self._alike[self._start_of(prefix)].append(prefix)
        self._tokens += prefix.prompt_length
        if prefix.prefix:
            prefix.prefix.users += 1

    @property
    def crowded(self) -> bool:
        """Return whether there is little room for more."""
        return bool(self.live) and (2 * len(self.live) > self.most or 2 * self._tokens > self.most_tokens)

    def drop_unused(self) -> list[Prefix]:
        """Forget the prefixes that nothing uses, and return them. Those that are still prefilled stay."""
        return list(self._drop_oldest(NOTHING))

    def make_room(self, following: Beginning) -> list[Prefix]:
        """Forget as few of them as leave room for more, those first that were used longest ago."""
        oldest, dropped = self._drop_oldest(following), []
        while self.crowded and (prefix := next(oldest, None)):
            dropped.append(prefix)
        return dropped

    def _longest(self, ids: NDArray[np.int32], adapter: int) -> list[Prefix]:
        """Return all copies of the longest prefix of a prompt."""
        found = [p for p in self._alike.get(self._start(ids, adapter), ()) if p.begins(ids, adapter)]
        longest = max((p.prompt_length for p in found), default=0)
        return [p for p in found if p.prompt_length == longest]

    def _drop_oldest(self, following: Beginning) -> Iterator[Prefix]:
        """Forget one complete prefix after the other that nothing uses; yield each."""
        kept = self._longest(np.array(following.ids, np.int32), following.adapter)
        while unused := [p for p in self.live if p.complete and not p.users and p not in kept]:
            prefix = min(unused, key=lambda p: p.last_used)
            self._drop(prefix)
            yield prefix

    def _drop(self, prefix: Prefix) -> None:
        prefix.live = False
        self.live.remove(prefix)
        start = self._start_of(prefix)
        self._alike[start].remove(prefix)
        if not self._alike[start]:
            del self._alike[start]
        self._tokens -= prefix.prompt_length
        if prefix.prefix:
            prefix.prefix.users -= 1

    def _start(self, ids: NDArray[np.int32], adapter: int) -> _Start:
        return adapter, ids[: self._least].tobytes()

    def _start_of(self, prefix: Prefix) -> _Start:
        return self._start(np.array(prefix.input_ids[: self._least], np.int32), prefix.adapter)
