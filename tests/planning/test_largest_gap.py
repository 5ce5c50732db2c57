"""The largest gap between two tokens of rows: of steps that are known, and of simulated jobs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdecode.planning import lengths
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.largest_gap import DecodedSteps, LargestGaps
from hpcdecode.planning.outcome import figures
from hpcdecode.planning.simulator import SimulatedGroups, simulate
from hpcdecode.schedule.limits import LaneLimits

COST = Cost(2, [1, 512], [1e-3, 2e-3], [1, 512], [1e-4, 2e-4], 1e-5, 0.0, 1e-8, 0.0, 0.0)


@given(
    seconds=st.lists(st.integers(1, 9), min_size=12, max_size=40),
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 5), st.booleans()), max_size=8),
)
def test_gaps_are_those_between_the_times_of_tokens(seconds, rows):
    """Rows have their prompt done in a step, wait, decode for some steps, and may go on later with another prompt."""
    ends = np.cumsum(seconds).astype(float)
    found, known = np.full(len(rows), np.nan), [[] for _ in rows]
    done = {}  # by step, what ended with it; by the step after it, what gave up its room
    for row, (prefilled, wait, steps, again) in enumerate(rows):
        start = prefilled + wait
        known[row] += [ends[prefilled], *ends[start : start + steps]] if steps else [ends[start - 1]]
        last = start + steps - 1
        first = DecodedSteps(row, prefilled if steps else start - 1, start, steps, not again)
        done.setdefault(last + again, []).append(first)
        if again:
            known[row] += [*ends[last + 1 : last + 2], *ends[last + 2 : last + 4]]
            done.setdefault(last + 3, []).append(DecodedSteps(row, last + 1, last + 2, 2, True))
    gaps = LargestGaps(found)
    if max(done, default=0) >= len(ends):
        return
    for step, end in enumerate(ends):
        gaps.step(float(end), done.get(step, ()))
    expected = [max(np.diff(each), default=np.nan) for each in known]
    assert np.array_equal(found, expected, equal_nan=True)


def world(capacity, admission="reserve"):
    return SimulatedGroups(COST, [capacity], [LaneLimits(8, 4, 32, 64, None)], admission=admission)


def test_rows_that_decode_at_every_step_wait_for_the_longest_step():
    rows = lengths.fixed(40, 8, 33)
    outcome = simulate([world(1 << 20)], rows)
    assert np.isfinite(outcome.largest_gap).all()
    longest = 2.0 ** (max(outcome.gaps.counts) / 100)
    assert outcome.largest_gap.max() >= longest * 0.99
    assert np.median(outcome.largest_gap) == pytest.approx(longest, rel=0.25)
    bound = figures(outcome)["latency_bound_seconds"]
    assert bound == {"mean": outcome.latency_bound, "max": outcome.largest_gap.max()}


def test_rows_that_give_up_their_room_wait_longest():
    new = np.array([4] * 48 + [65] * 24)  # the first make it expect that others end early, too
    rows = lengths.Lengths(np.full(72, 8), new, np.full(72, 65), np.zeros(72))
    outcome, calm = (simulate([world(room, "optimistic")], rows) for room in (176, 1 << 20))
    assert outcome.preemptions > 0 == calm.preemptions
    assert outcome.largest_gap.max() > 3 * calm.largest_gap.max() and np.isfinite(outcome.largest_gap).all()


def test_rows_of_one_token_have_no_gap():
    outcome = simulate([world(1 << 20)], lengths.fixed(5, 8, 1))
    assert np.isnan(outcome.largest_gap).all() and np.isnan(outcome.latency_bound)
    assert figures(outcome)["latency_bound_seconds"] == {}
