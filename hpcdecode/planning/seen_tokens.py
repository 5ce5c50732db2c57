"""What attention to some of the cached tokens saves: those that an indexer chooses, or those in a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Count = Annotated[int, msgspec.Meta(ge=1)]  # these are what profiles of calibrations are checked for
Seconds = Annotated[float, msgspec.Meta(ge=0)]
OfRRanks = NDArray[np.float64] | NDArray[np.int64]  # a number of every R-rank, [R-ranks]


class PartRates(NamedTuple):
    """What layers of a kind change that attend to `most` tokens: seconds saved of a token beyond, and of a score."""

    most: int
    skipped_seconds: float
    score_seconds: float


class ChosenTokens(msgspec.Struct, frozen=True):
    """What indexers of sparse attention save and take, all layers; nothing while a query sees no more than they choose.

    Attributes:
        most: Cached tokens that a query attends to at those layers, index_topk.
        skipped_seconds_per_cached_token: What a cached token that is not chosen saves an R-rank, of R.
        score_seconds_per_cached_token: The index scores of a query and a cached token on an R-rank.
        skipped_seconds_per_pair: What a pair of a prompt that is not chosen saves.
        score_seconds_per_pair: The index scores of such a pair.
    """

    most: Count
    skipped_seconds_per_cached_token: Seconds
    score_seconds_per_cached_token: Seconds
    skipped_seconds_per_pair: Seconds
    score_seconds_per_pair: Seconds

    @property
    def of_cached_tokens(self) -> PartRates:
        """Return what they change of decode attention."""
        return PartRates(self.most, self.skipped_seconds_per_cached_token, self.score_seconds_per_cached_token)

    @property
    def of_pairs(self) -> PartRates:
        """Return what they change of the attention of prompts."""
        return PartRates(self.most, self.skipped_seconds_per_pair, self.score_seconds_per_pair)

    def of_member(self, tp: int) -> ChosenTokens:
        """Return what they save and take on a member of `tp`: every member has its heads, and all scores."""
        return msgspec.structs.replace(
            self,
            skipped_seconds_per_cached_token=self.skipped_seconds_per_cached_token / tp,
            skipped_seconds_per_pair=self.skipped_seconds_per_pair / tp,
        )


class WindowTokens(msgspec.Struct, frozen=True):
    """What windows of one size save, all layers that have them.

    Attributes:
        most: Tokens that a query sees at those layers; attention in chunks is counted as if each saw a whole one.
        skipped_seconds_per_cached_token: What a cached token that has left the window saves an R-rank, of R.
        skipped_seconds_per_pair: What a pair of a prompt saves that is not in a window.
    """

    most: Count
    skipped_seconds_per_cached_token: Seconds
    skipped_seconds_per_pair: Seconds

    @property
    def of_cached_tokens(self) -> PartRates:
        """Return what they change of decode attention."""
        return PartRates(self.most, self.skipped_seconds_per_cached_token, 0.0)

    @property
    def of_pairs(self) -> PartRates:
        """Return what they change of the attention of prompts."""
        return PartRates(self.most, self.skipped_seconds_per_pair, 0.0)

    def of_member(self, tp: int) -> WindowTokens:
        """Return what they save on a member of `tp`, which has its heads."""
        return WindowTokens(self.most, self.skipped_seconds_per_cached_token / tp, self.skipped_seconds_per_pair / tp)


class Beyond(NamedTuple):
    """How many tokens queries have beyond the most that some layers attend to.

    Attributes:
        tokens: All together, of every R-rank or of a rank's prompts.
        queries: Those that have any.
    """

    tokens: OfRRanks | float
    queries: OfRRanks | float


def beyond_if_alike(most: int, seen: OfRRanks | float, queries: OfRRanks | float) -> Beyond:
    """Return what queries have beyond `most` tokens, as if each had equally many of all the `seen` ones."""
    tokens = np.maximum(seen - most * queries, 0)
    return Beyond(tokens, np.where(tokens > 0, queries, 0))


def of_chunk(most_seen: Sequence[int], start: int, count: int) -> list[Beyond]:
    """Return what `count` tokens of a prompt behind `start` others have beyond each of some numbers of tokens."""
    ends = [(max(start - most, 0), max(start + count - most, 0)) for most in most_seen]
    return [Beyond((last * (last + 1) - first * (first + 1)) // 2, last - first) for first, last in ends]


def plus(one: Sequence[Beyond], other: Sequence[Beyond]) -> list[Beyond]:
    """Return what the tokens of prompts of both have."""
    both = zip(one, other, strict=True)
    return [Beyond(float(a.tokens) + float(b.tokens), float(a.queries) + float(b.queries)) for a, b in both]


def choosing_seconds(
    rates: Sequence[PartRates],
    seen: OfRRanks | float,
    queries: OfRRanks | float,
    beyond: Sequence[Beyond] | None = None,
) -> NDArray[np.float64]:
    """Return what layers that attend to a part add to attention to all tokens, or save of it if it is below 0.

    Args:
        rates: Of each kind of these layers.
        seen: Tokens that all queries might attend to.
        queries: Their number.
        beyond: What they have beyond the most tokens of each kind; None if they count as alike.
    """
    seconds = np.zeros(np.shape(seen))
    for i, (most, skipped, score) in enumerate(rates):
        tokens, above = beyond[i] if beyond is not None else beyond_if_alike(most, seen, queries)
        seconds += score * (tokens + most * above) - skipped * tokens
    return seconds
