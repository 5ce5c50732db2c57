"""What a sequence has in a tier whose K and V have left the KV cache."""

from __future__ import annotations

from typing import NamedTuple


class SwapTicket(NamedTuple):
    """A copy of a sequence's K and V in the tiers of an R-rank.

    Attributes:
        rank: The R-rank.
        number: By which its S-rank names it.
        chunks: That it takes of the tiers.
    """

    rank: int
    number: int
    chunks: int
