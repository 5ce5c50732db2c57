"""Optimistic admission without a model: no R-rank overflows, no row starves, and rows enter by what is expected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdecode.attention.footprint import Footprint
from hpcdecode.errors import InvariantViolation
from hpcdecode.planning import lengths
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.planning.simulated_lane import SimulatedLane
from hpcdecode.requests.params import SamplingParams
from hpcdecode.schedule.expected import GeneratedLengths
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.optimistic import MOST_PREEMPTIONS, OptimisticPlacement
from tests.support.families import SCHEDULED, WINDOWED, run_families
from tests.support.preemption import hasty_placement
from tests.support.scheduling import ListFeed, Machine, prompts

CASES = {
    **SCHEDULED,
    "rate": st.sampled_from([0.0, 0.1, 0.5]),
    "growth": st.sampled_from([1, 4]),
}


@settings(max_examples=25, deadline=None)
@given(**CASES)
def test_families_that_are_preempted_at_any_step_are_done_once(**case):
    check_families(**case)


@settings(max_examples=25, deadline=None)
@given(**{**CASES, **WINDOWED})
def test_room_that_windows_leave_is_enough(**case):
    check_families(**case)


@pytest.mark.full
@settings(max_examples=2000, deadline=None)
@given(**{**CASES, **WINDOWED})
def test_two_thousand_times_the_room_that_windows_leave_is_enough(**case):
    check_families(**case)


@pytest.mark.full
@settings(max_examples=5000, deadline=None)
@given(**CASES)
def test_five_thousand_families_that_are_preempted_at_any_step(**case):
    check_families(**case)


def test_what_is_prefilled_starts_once_the_rest_of_its_micro_batch_has_left():
    rows = [(1, 16, 5), (1, 2, 1), (59, 1, 1), (68, 1, 1), (1, 1, 1)]  # prompt tokens, max_tokens, samples
    sizes = {"prefill_tokens": 8, "batch": 5, "period": 1, "lanes": 1, "block": 1, "capacity": [100] * 3}
    families = [(prompt, most, [None] * samples, [], (0, 0)) for prompt, most, samples in rows]
    check_families(0.1, rows=families, shared=0, schedule="static", load=300, growth=1, **sizes)


def check_families(rate, **case):
    machine = run_families(placement=hasty_placement(rate), **case)
    assert all(s.preemptions <= MOST_PREEMPTIONS for s in machine.done)
    assert sum(s.preemptions for s in machine.schedulers) == sum(s.preemptions for s in machine.done)


def stopping(counts, most=200, prompt=10):
    """Rows of at most `most` tokens, which end after `counts`, and the tokens that end them."""
    feed = ListFeed(prompts([(prompt, most)] * len(counts)))
    for row in feed.prompts:
        row.params = SamplingParams(max_tokens=most, ignore_eos=True, stop_token_ids=(9,))
    return feed, {(line, 0, count - 1): 9 for line, count in enumerate(counts, 1)}


SIZES = {"batch": 24, "period": 12, "steps": 199, "capacity": [16 * 224], "block": 16, "prefill_tokens": 512}


def machine_of(counts, admission, **sizes):
    feed, stops = stopping(counts)
    kind = OptimisticPlacement if admission == "optimistic" else None
    more = {"placement": kind, "growth": 8, "least_period": 1} if kind else {}
    return Machine(feed, stops=stops, **{**SIZES, **sizes}, **more).run(most=100_000)


def test_rows_that_end_early_take_less_than_half_of_the_steps():
    counts = np.random.default_rng(0).geometric(1 / 50, 600).clip(1, 200).tolist()
    reserved, optimistic = (machine_of(counts, admission) for admission in ("reserve", "optimistic"))
    assert 2 * optimistic.now < reserved.now
    assert sorted(len(s.generated) for s in optimistic.done) == sorted(counts)
    optimistic.require_empty()


def test_rows_that_never_end_early_enter_as_with_reservation():
    reserved, optimistic = (machine_of([200] * 60, admission) for admission in ("reserve", "optimistic"))
    assert optimistic.loads == reserved.loads
    assert optimistic.schedulers[0].preemptions == 0


def test_rows_that_become_longer_are_preempted_and_come_to_their_ends():
    counts = [5] * 200 + [200] * 100
    machine = machine_of(counts, "optimistic")
    assert machine.schedulers[0].preemptions > 0
    assert [len(s.generated) for s in sorted(machine.done, key=lambda s: s.prompt.line)] == counts
    machine.require_empty()


def test_the_youngest_leave_and_none_enters_before_an_older_one_that_waits():
    counts = [5] * 200 + [200] * 100
    left, entered = [], []

    class Watched(OptimisticPlacement):
        def _have_leave(self, rank):
            inside = [s for s, claim in self._claims[rank].items() if not claim.leaves]
            super()._have_leave(rank)
            left.append((inside, [s for s in inside if self._claims[rank][s].leaves]))

        def add(self, sequence):
            entered.append((sequence, set(self._waiting)))
            super().add(sequence)

    feed, stops = stopping(counts)
    Machine(feed, stops=stops, **SIZES, placement=Watched, growth=8).run(most=100_000).require_empty()
    assert left
    for inside, leaving in left:
        stay = [s for s in inside if s not in leaving and s.preemptions < MOST_PREEMPTIONS]
        assert all(s.seniority < one.seniority for s in stay for one in leaving)
    for sequence, waiting in entered:
        assert all(s.seniority >= sequence.seniority for s in waiting)


def test_claims_that_do_not_fit_or_are_counted_wrong_are_found():
    placement = OptimisticPlacement([64], Footprint(16), 1)
    placement._claimed.add(0, 16, None)
    with pytest.raises(InvariantViolation, match="counted as they change"):
        placement.check()
    placement._staying.add(0, 80, None)
    with pytest.raises(InvariantViolation, match="what is reserved fits"):
        placement.grow(0, 1)


def test_lengths_are_not_biased_by_those_that_are_cut_or_go_on():
    draw = np.random.default_rng(1)
    known = GeneratedLengths()
    assert known.share(100) == 1.0
    for tokens in draw.geometric(1 / 40, 4000):
        most = int(draw.integers(20, 60))
        known.add(int(min(tokens, most)), stopped=bool(tokens < most))
    known.estimate(draw.integers(1, 20, 200).tolist())
    cut_at_50 = (1 - (1 - 1 / 40) ** 50) * 40 / 50
    assert known.share(50) == pytest.approx(cut_at_50, rel=0.03)
    chance = known.going(np.array([[10], [30]]), np.array([[20, 10_000]] * 2) + np.array([[0], [20]]))
    assert chance[0, 0] == pytest.approx((1 - 1 / 40) ** 10, rel=0.05)
    assert chance[1, 0] == pytest.approx((1 - 1 / 40) ** 10, rel=0.05)


def test_two_thousand_preemptions_starve_no_row():
    check_starvation(2_000)


@pytest.mark.full
def test_one_million_preemptions_starve_no_row():
    check_starvation(1_000_000)


def check_starvation(preemptions):
    """Simulate until so many sequences were preempted, of rows that have room for a few at once."""
    draw = np.random.default_rng(5)
    rows = preemptions * 2 // 5
    new = draw.integers(1, 40, rows)
    feed = SimulatedFeed(lengths.Lengths(draw.integers(1, 20, rows), new, np.full(rows, 50), np.zeros(rows)))
    placement = hasty_placement(1.0)([160, 120], Footprint(4), 2)
    lanes = [SimulatedLane(i, feed, placement, LaneLimits(6, 4, 49, 64, None, schedule="fifo")) for i in range(2)]
    ended, now, oldest = 0, 0, 0
    begun: dict[int, int] = {}  # step at which a row was first in flight
    while not all(lane.exhausted() for lane in lanes):
        for lane in lanes:
            done = lane.step(now).ended
            for row in lane.in_flight:
                begun.setdefault(row, now)
            oldest = max([oldest, *(now - begun.pop(row, now) for row in done)])
            ended += len(done)
            assert all(s.preemptions <= MOST_PREEMPTIONS for s in lane.in_flight.values())
        now += 1
    for lane in lanes:  # what ended last is freed
        lane.step(now)
    placement.check()
    assert ended == rows and not any(placement.claimed)
    assert sum(lane.preemptions for lane in lanes) >= preemptions
    assert oldest < 500  # steps from a row's first token to its last
