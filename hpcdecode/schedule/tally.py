"""Group tokens on every R-rank, with blocks that several sequences share counted once."""

from __future__ import annotations

from collections import Counter

from hpcdecode.attention.footprint import Footprint
from hpcdecode.requests.prefix import SharedBlocks


class Tally:
    """Counts tokens.

    Args:
        ranks: number of R-ranks.
        footprint: what shared blocks take.

    Attributes:
        tokens: by R-rank.
    """

    def __init__(self, ranks: int, footprint: Footprint):
        self.tokens = [0] * ranks
        self._footprint = footprint
        self._users: Counter[SharedBlocks] = Counter()

    def add(self, rank: int, own: int, blocks: SharedBlocks | None) -> None:
        """Count a holder's own tokens, and its shared blocks if it is their first."""
        self.tokens[rank] += own
        if blocks:
            if not self._users[blocks]:
                self.tokens[rank] += self._footprint.of_blocks(blocks.tokens)
            self._users[blocks] += 1

    def remove(self, rank: int, own: int, blocks: SharedBlocks | None) -> None:
        """Count a holder's own tokens no longer, and its shared blocks if it was their last."""
        self.tokens[rank] -= own
        if blocks:
            self._users[blocks] -= 1
            if not self._users[blocks]:
                self.tokens[rank] -= self._footprint.of_blocks(blocks.tokens)
                del self._users[blocks]
