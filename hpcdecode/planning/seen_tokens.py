"""What attention to some of the cached tokens saves: those that an indexer chooses, or those in a window."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

Count = Annotated[int, msgspec.Meta(ge=1)]  # these are what profiles of calibrations are checked for
Seconds = Annotated[float, msgspec.Meta(ge=0)]
OfRRanks = NDArray[np.float64] | NDArray[np.int64]  # a number of every R-rank, [R-ranks]


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

    def of_member(self, tp: int) -> WindowTokens:
        """Return what they save on a member of `tp`, which has its heads."""
        return WindowTokens(self.most, self.skipped_seconds_per_cached_token / tp, self.skipped_seconds_per_pair / tp)


def choosing_seconds(
    most: int, skipped_seconds: float, score_seconds: float, seen: OfRRanks | float, queries: OfRRanks | float
) -> NDArray[np.float64]:
    """Return what choosing adds to attention to all of the `seen` tokens, or saves of it if it is below 0."""
    skipped = np.maximum(seen - most * queries, 0)
    return np.where(skipped > 0, score_seconds * seen - skipped_seconds * skipped, 0.0)
