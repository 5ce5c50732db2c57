"""How often the tokens of drafts have been right, by their places: what a draft brings."""

from __future__ import annotations

from hpcdecode.requests.speculative import MOST_DRAFTED

_FIRST = 0.8  # before any draft is known
_WEIGHT = 1 / 64  # of the newest draft in a mean, once there are as many


class DraftChances:
    """The chance that a token of a draft is right if those before it are: a mean over drafts for each place.

    Attributes:
        drafts: That were taken note of.
    """

    def __init__(self) -> None:
        self._means, self._counts, self.drafts = [_FIRST] * MOST_DRAFTED, [1] * MOST_DRAFTED, 0

    def of(self, place: int) -> float:
        """Return the chance of the token at a place, from 0."""
        return self._means[place]

    def learn(self, tokens: int, right: int) -> None:
        """Take note of a draft of so many tokens, of which the first ones were right."""
        self.drafts += 1
        for place in range(min(right + 1, tokens)):
            self._counts[place] += 1
            weight = max(1 / self._counts[place], _WEIGHT)
            self._means[place] += weight * ((place < right) - self._means[place])
