"""How many tokens sequences are expected to generate, by those that have ended and those that go on.

The chance to reach n tokens is estimated as Kaplan and Meier (1958) do: a sequence that was cut at its max_tokens, or
still goes on, says only that it is longer than what it has. So the estimate is not biased towards short sequences,
which end first, and before any has ended by itself every sequence is expected to take all that it may.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class GeneratedLengths:
    """The lengths of sequences that were generated, and what follows for others.

    Attributes:
        stops: sequences that ended before their max_tokens.
    """

    def __init__(self) -> None:
        self.stops = 0
        self._stopped = np.zeros(64, np.int64)  # sequences by tokens
        self._cut = np.zeros(64, np.int64)
        self._passed: NDArray[np.float64] = np.ones(1)  # chance to generate more than n tokens, by n

    def add(self, tokens: int, *, stopped: bool) -> None:
        """Count a sequence that has ended; stopped: by itself, not at its max_tokens."""
        while tokens >= len(self._cut):
            self._stopped = np.concatenate([self._stopped, np.zeros_like(self._stopped)])
            self._cut = np.concatenate([self._cut, np.zeros_like(self._cut)])
        (self._stopped if stopped else self._cut)[tokens] += 1
        self.stops += stopped

    def estimate(self, going: Sequence[int]) -> None:
        """Estimate anew; going: tokens, so far, of each sequence that goes on."""
        size = max([len(self._cut), *(tokens + 1 for tokens in going)])
        ends = np.bincount(going, minlength=size) if going else np.zeros(size, np.int64)
        ends[: len(self._cut)] += self._stopped + self._cut
        at_risk = np.cumsum(ends[::-1])[::-1]
        last = np.zeros(size)  # chance that a token is the last
        np.divide(self._stopped, at_risk[: len(self._cut)], out=last[: len(self._cut)], where=self._stopped > 0)
        self._passed = np.cumprod(1 - last, dtype=np.float64)

    def share(self, most: int) -> float:
        """Return what share of `most` tokens a sequence generates on average that may not generate more."""
        known = self._passed[:most]
        return float(known.sum() + (most - len(known)) * known[-1]) / most

    def going(self, generated: Tokens, later: Tokens) -> NDArray[np.float64]:
        """Return the chances that sequences go on behind so many tokens, float64, as the arguments broadcast.

        What is longer than all that is known is expected to go on.

        Args:
            generated: tokens of each sequence so far.
            later: tokens, at least as many.
        """
        end = len(self._passed) - 1
        now, then = self._passed[np.minimum(generated, end)], self._passed[np.minimum(later, end)]
        return np.divide(then, now, out=np.ones(np.broadcast(now, then).shape), where=now > 0)
