"""Prefixes that are held while nothing uses them: rows to come share them, and they go where room is needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from tests.support.families import SCHEDULED, drain_families, run_families
from tests.support.preemption import hasty_placement
from tests.support.scheduling import ListFeed, Machine

SIZES = {"batch": 1, "period": 1, "steps": 8, "block": 16, "prefill_tokens": 512, "shared": 1000, "schedule": "static"}


def rows(*runs, max_tokens=9):
    """Rows of runs of tokens, each a list of (token, count)."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ids = [[token for token, count in run for _ in range(count)] for run in runs]
    return [Prompt(i, str(i), of_row, params) for i, of_row in enumerate(ids, 1)]


class SlowFeed(ListFeed):
    """Brings a row once the lane has asked in vain twice."""

    asked = 0

    def peek(self):
        self.asked += 1
        return super().peek() if self.asked > 2 else None

    def exhausted(self):
        return not self.prompts

    def pop(self):
        self.asked = 0
        return super().pop()


def run(these, keeps, capacity=4000, feed=SlowFeed, **sizes):
    machine = Machine(feed(these), capacity=[capacity], keeps_prefixes=keeps, **{**SIZES, **sizes}).run()
    assert len(machine.done) == len(these)
    machine.require_empty()
    return machine


def prefilled(machine):
    return sum(p.prefill_tokens for p in machine.steps)


@pytest.mark.parametrize("keeps, tokens", [(True, 2 * 120 + 38 * 24), (False, 40 * 120)])
def test_rows_one_after_the_other_share_what_is_kept(keeps, tokens):
    these = rows(*([(5, 100), (10 + i, 20)] for i in range(40)))
    assert prefilled(run(these, keeps)) == tokens


@pytest.mark.parametrize(("batch", "period"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("alike", [1, 2, 6])
def test_a_row_makes_a_prefix_of_what_the_next_one_shares_with_it(batch, period, alike):
    """Rows come `alike` of a kind at a time: each kind's 96 tokens in whole blocks are prefilled once."""
    these = rows(*([(5 + i // alike, 100), (30 + i, 20)] for i in range(12)))
    machine = run(these, False, feed=ListFeed, batch=batch, period=period)
    assert prefilled(machine) == (12 * 120 if alike == 1 else 12 // alike * 96 + 12 * 24)


def test_rows_share_prefixes_with_those_of_their_own_adapter_alone():
    """K and V depend on it."""
    these = rows(*([(5, 100), (10 + i, 20)] for i in range(30)))
    for i, row in enumerate(these):
        row.adapter = i % 3 - 1
    assert prefilled(run(these, True)) == 3 * (2 * 120 + 8 * 24)


def test_those_go_first_that_were_used_longest_ago():
    """The second row of a kind makes a prefix. A third prefix is one too many once it is there."""
    kinds = [1, 2, 1, 2, 3, 1, 3, 1, 3, 2, 1]
    machine = run(rows(*([(kind, 64), (100 + i, 8)] for i, kind in enumerate(kinds))), True, least_prefixes=4)
    alone, makes, shares = [72], [64, 8], [8]
    told = [alone, alone, makes, makes, alone, shares, makes, shares, shares]  # 2 goes for 3
    told += [makes, makes]  # 2 comes back, for which 1 goes
    assert [p.prefill_tokens for p in machine.steps if p.prefill_tokens] == [count for row in told for count in row]


def test_a_large_lane_holds_one_for_every_two_rows():
    """300 pairs of rows, of which 200 are under way at once."""
    these = rows(*([(i // 2, 64), (1000 + i, 8)] for i in range(600)), max_tokens=30)
    sizes = {"capacity": 100_000, "batch": 400, "period": 2, "steps": 29, "shared": 100_000, "prefill_tokens": 4096}
    machine = run(these, False, feed=ListFeed, **sizes)
    assert prefilled(machine) == 300 * 64 + 600 * 8


@pytest.mark.parametrize("lanes", [1, 2])
def test_they_go_where_a_row_needs_the_room(lanes):
    these = rows([(5, 64), (6, 9)], [(5, 64), (7, 9)], [(8, 200)], [(5, 64), (9, 9)], max_tokens=40)
    run(these, True, capacity=256, lanes=lanes, schedule="fifo")


@pytest.mark.parametrize("schedule", ["fixed-f", "static", "fifo"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_row_waits_no_longer_for_them_than_a_period(lanes, schedule):
    """The machine checks how long lanes wait; the last row needs all that the R-rank has."""
    these = rows([(5, 64), (6, 9)], [(5, 64), (7, 9)], [(8, 216)], max_tokens=40)
    run(these, True, capacity=256, lanes=lanes, schedule=schedule, period=12, steps=60, feed=ListFeed)


CASES = {
    **SCHEDULED,
    "shared": st.sampled_from([100, 1000]),
    "least_prefixes": st.sampled_from([3, 8]),
}


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_families(**case):
    run_families(keeps_prefixes=True, **case)


@settings(max_examples=25, deadline=None)
@given(rate=st.sampled_from([0.1, 0.5]), growth=st.sampled_from([1, 4]), **CASES)
def test_families_that_are_preempted(rate, **case):
    run_families(keeps_prefixes=True, placement=hasty_placement(rate), **case)


@settings(max_examples=40, deadline=None)
@given(drained=st.integers(0, 90), rate=st.sampled_from([0.1, 0.5]), keeps=st.booleans(), **CASES)
def test_families_that_are_preempted_and_drained(drained, rate, keeps, **case):
    drain_families(drained=drained, keeps_prefixes=keeps, placement=hasty_placement(rate), **case)
