"""What sequences share of the KV cache, and what a sequence and a prefix have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_NEVER = 1 << 40
new_key = count().__next__  # of a sequence or prefix, unlike all others of this process


@dataclass(slots=True, eq=False)
class SharedBlocks:
    """Whole KV blocks that several sequences of a request hold: the positions from `start` up to `end`."""

    start: int
    end: int

    @property
    def tokens(self) -> int:
        """Return how many tokens the blocks hold."""
        return self.end - self.start


class KvHolder(Protocol):
    """What takes room in the KV cache, and is prefilled: a sequence or a prefix."""

    prefilled: int
    slot: int

    @property
    def adapter(self) -> int:
        """Return the number of the adapter that updates its tokens; -1 for none."""

    @property
    def shared_blocks(self) -> SharedBlocks | None:
        """Return blocks that it shares with sequences of its request, or None."""

    @property
    def input_ids(self) -> list[int]:
        """Return the tokens to prefill."""

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens to prefill."""

    @property
    def final_length(self) -> int:
        """Return its tokens in the KV cache at the end."""

    @property
    def end_step(self) -> int:
        """Return the last lane step in which it is held."""

    @property
    def ahead(self) -> int:
        """Return the tokens that it may hold beyond its course, of a draft."""

    @property
    def shared(self) -> int:
        """Return how many of its first tokens lie in blocks that are counted elsewhere."""

    @property
    def ranks(self) -> list[int]:
        """Return the R-ranks that hold it."""

    @property
    def with_forks(self) -> Sequence[KvHolder]:
        """Return the sequences that go on from its prompt."""


def remaining(holder: KvHolder) -> int:
    """Return the tokens that are not prefilled yet."""
    return holder.prompt_length - holder.prefilled


@dataclass(slots=True, eq=False)
class Prefix:
    """A beginning that prompts of a lane share, in whole KV blocks. Their sequences have the same adapter, or none.

    Attributes:
        prefix: the shorter one that it begins with; `shared` of its tokens lie in that one's blocks.
        ranks: R-ranks that hold it, all in the same slot.
        users: sequences, and longer prefixes, that begin with it and not with a copy on other R-ranks.
        last_used: lane step in which a sequence last began with it.
        adapter: number of their adapter, which K and V depend on; -1 for none.
        with_forks: no sequences; it is prefilled and draws no token.
        key: by which the ranks of a group name it.
    """

    input_ids: list[int]
    prefix: Prefix | None
    ranks: list[int] = field(default_factory=list)
    slot: int = -1
    prefilled: int = 0
    users: int = 0
    last_used: int = 0
    live: bool = True
    adapter: int = -1
    shared_blocks: SharedBlocks | None = None
    with_forks: tuple[()] = ()
    key: int = field(default_factory=new_key)
    _ids: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self._ids = np.array(self.input_ids, np.int32)

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens to prefill."""
        return len(self.input_ids)

    @property
    def final_length(self) -> int:
        """Return its tokens in the KV cache."""
        return len(self.input_ids)

    @property
    def ahead(self) -> int:
        """Return 0: it has no draft."""
        return 0

    @property
    def shared(self) -> int:
        """Return how many of its first tokens lie in the blocks of another prefix."""
        return self.prefix.prompt_length if self.prefix else 0

    @property
    def end_step(self) -> int:
        """Return a step that never comes: it is held until nothing uses it."""
        return _NEVER

    @property
    def complete(self) -> bool:
        """Return whether all of it is prefilled."""
        return self.prefilled == self.prompt_length

    def begins(self, ids: NDArray[np.int32], adapter: int) -> bool:
        """Return whether it is the beginning of longer ids of a prompt with an adapter, or -1 for none."""
        return self.prompt_length < len(ids) and self.equals(ids[: self.prompt_length], adapter)

    def equals(self, ids: NDArray[np.int32], adapter: int) -> bool:
        """Return whether it has these ids and an adapter, or -1 for none."""
        return adapter == self.adapter and np.array_equal(ids, self._ids)
