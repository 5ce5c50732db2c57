"""Ends the reasoning of a sequence once it has taken its tokens (`thinking_token_budget`)."""

from __future__ import annotations

import msgspec

_FIRST_TOKENS = 8  # within which a text begins its reasoning, if it does


class Thinking(msgspec.Struct, frozen=True):
    """How a request's reasoning begins and ends.

    Attributes:
        begin: Tokens that begin it.
        end: Tokens that end it.
        opened: Whether the prompt has begun it.
    """

    begin: list[int]
    end: list[int]
    opened: bool

    def forced(self, budget: int, generated: list[int]) -> tuple[int | None, bool]:
        """Return the token that must come next, or None, and whether the reasoning has ended for good.

        It depends on what was generated alone, so that a sequence goes on alike after an interruption.

        Args:
            budget: Most tokens of the reasoning, without its begin and end.
            generated: What was generated so far.
        """
        start = self._start(generated)
        if start is None:
            return None, len(generated) >= _FIRST_TOKENS + len(self.begin)
        if len(generated) - start < budget:
            return None, False
        if _find(generated, self.end, start) is not None:
            return None, True
        most = min(len(self.end) - 1, len(generated) - start)
        come = next(n for n in range(most, -1, -1) if generated[len(generated) - n :] == self.end[:n])
        return self.end[come], False

    def _start(self, generated: list[int]) -> int | None:
        """Return where the reasoning begins in what was generated; None if it does not."""
        if self.opened:
            return 0
        begin = _find(generated[: _FIRST_TOKENS + len(self.begin)], self.begin, 0)
        return None if begin is None else begin + len(self.begin)


def _find(tokens: list[int], wanted: list[int], start: int) -> int | None:
    """Return where `wanted` first occurs from `start` on, or None."""
    last = len(tokens) - len(wanted)
    while start <= last:
        try:
            start = tokens.index(wanted[0], start, last + 1)
        except ValueError:
            return None
        if tokens[start : start + len(wanted)] == wanted:
            return start
        start += 1
    return None
