"""Guesses of tokens that a scheduler without a model gets, of which a share is right."""

from __future__ import annotations

import numpy as np

from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.schedule.speculation import Speculation

WRONG = -1
MOST = 9  # tokens of a draft


class RandomGuesses(Speculation):
    """Drafts of any length, whose tokens are right with a chance of `rate`.

    Args:
        rate: chance.
        next_token: of a sequence that has so many tokens.
        placement: of the S-rank.
    """

    def __init__(self, rate, next_token, placement):
        super().__init__(SpeculativeConfig(num_speculative_tokens=MOST), placement)
        for rows in (8, 8, 16):
            self.price.observe(0.1, rows, 8)  # rows cost nothing
        self._share, self._next_token, self._draw = rate, next_token, np.random.default_rng(0)

    def _draft_of(self, config, sequence, price, most):
        super()._draft_of(config, sequence, price, most)
        made = len(sequence.generated)
        left = min(config.num_speculative_tokens, sequence.request.max_new_tokens - made - 1, most)
        count = self._draw.integers(0, left + 1) if sequence.beams is None else 0
        right = self._draw.random(count) < self._share
        return [self._next_token(sequence, made + i) if good else WRONG for i, good in enumerate(right)]
