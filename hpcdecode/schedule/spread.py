"""On how many R-ranks a prefix lies: each that holds it takes KV tokens for it, and rows that share it.

Rows that may go to any R-rank are spread most evenly, and a lane waits for the R-rank that has most. So prefixes lie on
all R-ranks while they take a small part of the KV caches. If they would take more, each lies on as many as its rows
need, which is the same part of the R-ranks as its rows are of the batch. How many these are is known from the first
rows of a job. Where more come than that, a copy of the prefix is made on twice as many other R-ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcdecode.requests.prompt import Prompt

_SHARED = 128  # tokens that rows begin with, from which on they share them: two KV blocks
_SLACK = 2  # more rows than the even share, until a copy is made


class Spread(msgspec.Struct, frozen=True):
    """How many rows of a job begin alike.

    Attributes:
        common: tokens that all rows begin with.
        rows: sequences that share a longer prefix; 1 if that is not known.
    """

    common: int = 0
    rows: int = 1

    def ranks(self, tokens: int, live: int, of: int, batch: int, room: int) -> int:
        """Return on how many R-ranks a prefix should lie: on all that it may, but on as many as its rows need.

        Args:
            tokens: of the prefix.
            live: other prefixes of the lane.
            of: R-ranks of the lane.
            batch: B of the lane.
            room: KV tokens, of all R-ranks together, that prefixes of the lane may take.
        """
        if tokens <= self.common:
            return of
        prefixes = max(live + 1, batch // self.rows if self.rows > 1 else 0)
        return min(max(-(-self.rows * of // batch), room // (prefixes * tokens), 1), of)


UNKNOWN = Spread()


def has_many(users: int, ranks: int, of: int, batch: int) -> bool:
    """Return whether a prefix has so many users that a copy should be made on other R-ranks.

    Args:
        users: sequences that begin with it.
        ranks: R-ranks that hold it.
        of: R-ranks of the lane.
        batch: B of the lane.
    """
    return ranks < of and users >= max(_SLACK * batch * ranks // of, _SLACK)


def spread_of(first: Sequence[Prompt], alike: Sequence[int]) -> Spread:
    """Return how many rows begin alike of those at the beginning of a job; see `shared_by_pairs` for `alike`."""
    if not alike:
        return UNKNOWN
    common = min(alike)
    runs = [first[0].sequences]
    for prompt, tokens in zip(first[1:], alike, strict=True):
        if tokens >= common + _SHARED:
            runs[-1] += prompt.sequences
        else:
            runs.append(prompt.sequences)
    return Spread(common, round(sum(n * n for n in runs) / sum(runs)))


def shared_by_pairs(first: Sequence[Prompt]) -> list[int]:
    """Return how many tokens each row but the first has in common with the row before; 0 if they are too few."""
    return [_shared(one, other) for one, other in pairwise(first)]


def in_common(ids: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many tokens both begin with."""
    length = min(len(ids), len(other))
    different = np.flatnonzero(ids[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _shared(one: Prompt, other: Prompt) -> int:
    begun = one.token_ids[:_SHARED]
    if len(begun) < _SHARED or begun != other.token_ids[:_SHARED] or one.adapter != other.adapter:
        return 0
    return in_common(np.array(one.token_ids, np.int32), np.array(other.token_ids, np.int32))
