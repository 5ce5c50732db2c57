"""What a row of a step costs, as steps tell."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.schedule.draft_price import PROBE_STEPS, DraftPrice


def observed(seconds_of, rows, count=200, noise=0.0):
    """The price after steps of so many rows each, half of which beyond 8 are right; the next step is no probe."""
    price, draw = DraftPrice(), np.random.default_rng(0)
    for _ in range(count + (count % PROBE_STEPS == 0)):
        n = int(draw.choice(rows))
        price.observe(seconds_of(n) * (1 + noise * draw.standard_normal()), n, 8 + (n - 8) // 2)
    return price.value


def test_rows_are_free_where_steps_take_as_long_whatever_their_rows():
    assert observed(lambda n: 0.1, range(8, 40)) == pytest.approx(0, abs=1e-9)
    assert observed(lambda n: 0.1, range(8, 40), noise=0.05) < 0.15


def test_a_row_costs_what_a_token_does_where_time_is_that_of_rows():
    """Where as many rows as tokens are computed; more of them if tokens are wrong."""
    assert observed(lambda n: 0.001 * n, [8, 9]) == pytest.approx(1, abs=0.1)
    assert 0.5 < observed(lambda n: 0.001 * n, range(8, 40), noise=0.05) < 1


def test_the_cost_is_that_of_a_row_beside_what_a_step_takes_in_any_case():
    found = observed(lambda n: 0.1 + 0.001 * n, range(8, 40))
    assert found == pytest.approx(0.001 * 16 / (0.1 + 0.001 * 23.5), rel=0.2)


def test_the_cost_is_not_known_before_steps_of_several_sizes_and_now_and_then():
    price, values = DraftPrice(), []
    assert price.value is None
    for step in range(4 * PROBE_STEPS):
        price.observe(0.001 * (8 + step % 2), 8 + step % 2, 8)
        values.append(price.value)
    assert values.count(None) in (4, 5, 6)
    assert values[-1] is None  # a probe


def test_what_was_learnt_stays_when_rows_no_longer_vary():
    price = DraftPrice()
    for step in range(100):
        price.observe(0.001 * (8 + step % 2), 8 + step % 2, 8)
    for _ in range(PROBE_STEPS // 2):
        price.observe(0.008, 8, 8)
    assert price.value > 0.5


def test_a_pause_counts_as_a_long_step_at_most():
    price = DraftPrice()
    for step in range(150):
        price.observe(5.0 if step == 99 else 0.1, 8 + step % 3, 8)
    assert price.value < 0.5
