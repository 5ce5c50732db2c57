"""Prompt tokens of a step, by what steps took."""

from __future__ import annotations

import pytest

from hpcdecode.schedule.pace import LEAST_TOKENS, Pace


def settled(gap, most=2048, parts=1, decode=0.02, token=1e-3):
    pace = Pace(gap, most, parts)
    for _ in range(20):
        pace.observe(decode, 0, 8)
        pace.observe(decode + 400 * token, 400, 8)
        pace.observe(5.0, 3, 8)  # too few tokens to tell
    return pace.tokens


@pytest.mark.parametrize(
    ("gap", "options", "expected"),
    [
        (None, {}, 2048),
        (0.0, {}, 2048),
        (0.42, {}, 400),
        (0.84, {"parts": 2}, 400),
        (0.01, {}, LEAST_TOKENS),
        (100.0, {}, 2048),
    ],
)
def test_steps_take_as_long_as_they_may(gap, options, expected):
    assert settled(gap, **options) == pytest.approx(expected, rel=0.05)


def test_before_it_knows_it_bounds_nothing():
    assert Pace(0.1, 512).tokens == 512
