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
_PART = 4  # one KV token in so many is for prefixes that lie on more R-ranks than they must
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


def prefix_room(capacity: Sequence[int], lanes: int) -> int:
    """Return the KV tokens, of all R-ranks, that prefixes of a lane may take and lie on more of them than they must."""
    return sum(capacity) // (_PART * lanes)


def has_many(users: int, ranks: int, of: int, batch: int) -> bool:
    """Return whether a prefix has so many users that a copy should be made on other R-ranks.

    Args:
        users: sequences that begin with it.
        ranks: R-ranks that hold it.
        of: R-ranks of the lane.
        batch: B of the lane.
    """
    return ranks < of and users >= max(_SLACK * batch * ranks // of, _SLACK)


def spread_of(sequences: Sequence[int], alike: Sequence[int]) -> Spread:
    """Return how many rows begin alike of those at the beginning of a job.

    Args:
        sequences: of each row.
        alike: tokens that each row but the first shares with the row before.
    """
    if not alike:
        return UNKNOWN
    common = min(alike)
    runs = [sequences[0]]
    for count, tokens in zip(sequences[1:], alike, strict=True):
        if tokens >= common + _SHARED:
            runs[-1] += count
        else:
            runs.append(count)
    return Spread(common, round(sum(n * n for n in runs) / sum(runs)))


def shared_by_pairs(first: Sequence[Prompt]) -> list[int]:
    """Return `shared_tokens` of each row but the first, with the row before."""
    return [shared_tokens(one, other) for one, other in pairwise(first)]


def in_common(ids: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many tokens both begin with."""
    length = min(len(ids), len(other))
    different = np.flatnonzero(ids[:length] != other[:length])
    return int(different[0]) if len(different) else length


def shared_tokens(one: Prompt, other: Prompt) -> int:
    """Return how many tokens two rows have in common; 0 if they are too few to be shared."""
    begun = one.token_ids[:_SHARED]
    if len(begun) < _SHARED or begun != other.token_ids[:_SHARED] or one.adapter != other.adapter:
        return 0
    return in_common(np.array(one.token_ids, np.int32), np.array(other.token_ids, np.int32))
