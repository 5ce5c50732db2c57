"""What a row was spared, or tried ahead. It depends on the rows beside it, so it is in no results."""

from __future__ import annotations

import msgspec


class Shortcuts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of a row, or of many.

    Attributes:
        cached_tokens: Tokens of the prompt whose K and V other rows had.
        drafted_tokens: Tokens that were guessed, in speculative decoding.
        confirmed_tokens: Those of them that were right.
    """

    cached_tokens: int = 0
    drafted_tokens: int = 0
    confirmed_tokens: int = 0

    def __add__(self, other: Shortcuts) -> Shortcuts:
        """Return the counts of both."""
        return Shortcuts(
            self.cached_tokens + other.cached_tokens,
            self.drafted_tokens + other.drafted_tokens,
            self.confirmed_tokens + other.confirmed_tokens,
        )

    def sharing(self, tokens: int) -> Shortcuts:
        """Return the counts of a row of which a sequence enters that shares so many tokens, not for the first time."""
        return Shortcuts(max(self.cached_tokens, tokens), self.drafted_tokens, self.confirmed_tokens)


NO_SHORTCUTS = Shortcuts()
