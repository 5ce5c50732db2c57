"""Which rows of each member's share of a sum can be other than zeros: only these are sent.

All members know them from what they compute alike, so no counts are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class OwnRows:
    """The rows of T tokens that K members have something of.

    Args:
        owners: Members that have something of each token, [T, k], repeated ones included.
        members: K.

    Attributes:
        tokens: T.
        counts: Rows of each member, [K].
    """

    def __init__(self, owners: NDArray[np.int64], members: int):
        self.tokens = len(owners)
        has = np.zeros((members, self.tokens), bool)
        has[owners.T, np.arange(self.tokens)] = True
        self.counts: NDArray[np.int64] = has.sum(1)
        self._of_all = torch.from_numpy(has.all(0))
        self._places = torch.from_numpy(has.nonzero()[1]).split(self.counts.tolist())

    @property
    def way(self) -> str:
        """Return how to add up with the fewest bytes, those of all members together.

        With n rows of T * K, each of h columns, these are (K - 1) times:

        - `rows`, all to all, who each add them: n * h;
        - `columns`, some of these to each, and the sums to all: (n / K + T) * h;
        - `all`, likewise with the rows of zeros: 2 * T * h.
        """
        rows, members = int(self.counts.sum()), len(self.counts)
        if rows * (members - 1) <= self.tokens * members:
            return "rows"
        return "columns" if rows < self.tokens * members else "all"

    def of(self, member: int, x: Tensor) -> Tensor:
        """Return a member's rows of its share [T, columns]."""
        return x.index_select(0, self._places[member])

    def added(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of the members' rows in their order, float32 [T, columns], as if the others were there as 0.

        Args:
            parts: Of each member, [its rows, columns].
        """
        total = torch.zeros(self.tokens, parts[0].shape[1])
        total[self._of_all] = -0.0  # -0 + x is x, for -0 too; 0 + -0 is 0, as where a member has zeros
        for places, part in zip(self._places, parts, strict=True):
            total[places] += part
        return total
