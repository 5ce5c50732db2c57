"""Scores of beams, at the ends of what a row may ask for."""

from __future__ import annotations

from math import isfinite

import pytest

from hpcdecode.requests.beams import Beams, Move
from hpcdecode.requests.params import MAX_LENGTH_PENALTY


@pytest.mark.parametrize("penalty", [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY])
def test_lengths_to_the_greatest_power_are_numbers(penalty):
    beams = Beams(1, penalty, 1 << 31, frozenset((3,)))
    beams._tokens = [[5] * ((1 << 20) - 1)]
    beams.advance([Move(0, 3, -1e6), Move(0, 4, -2e6)])
    (found,) = beams.best
    assert isfinite(found.score) and found.score < 0 and found.logprob == -1e6
