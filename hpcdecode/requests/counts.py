"""How often a sequence has each token, for penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The tokens of a sequence, each once, and how often it was generated; grows with the sequence.

    `ids` and `counts` are int64 [n] for n different tokens. A prompt token that was not generated counts 0.
    """

    def __init__(self, prompt_ids: Sequence[int]):
        self._ids = np.unique(np.array(prompt_ids, np.int64))
        self._counts = np.zeros_like(self._ids)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}
        self._taken = 0

    def update(self, generated: Sequence[int]) -> TokenCounts:
        """Count the tokens that are new since the last call."""
        for token in generated[self._taken :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        self._taken = len(generated)
        return self

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return its different tokens."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return how often each was generated."""
        return self._counts[: len(self._places)]
