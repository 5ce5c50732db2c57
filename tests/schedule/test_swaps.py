"""Sequences that leave for tiers: rows come to the same ends, whatever comes back and whenever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hpcdecode.errors import InvariantViolation
from hpcdecode.schedule.optimistic import MOST_PREEMPTIONS
from hpcdecode.schedule.plan import Plan, wire_length
from hpcdecode.schedule.swaps import Swaps
from tests.support.families import SCHEDULED, WINDOWED, run_families
from tests.support.preemption import hasty_placement
from tests.support.swapping import DelayedTiers

CASES = {
    **SCHEDULED,
    "rate": st.sampled_from([0.1, 0.5]),
    "growth": st.sampled_from([1, 4]),
    "chunks": st.sampled_from([0, 2, 100]),
    "loses": st.sampled_from([0.0, 0.3, 1.0]),
}


@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(**CASES)
def test_families_that_leave_for_tiers_at_any_step_are_done_once(**case):
    check_families(**case)


@settings(max_examples=30, deadline=None)
@given(**{**CASES, **WINDOWED})
def test_what_windows_keep_leaves_for_tiers_and_comes_back(**case):
    check_families(**case)


@pytest.mark.full
@settings(max_examples=3000, deadline=None)
@given(**CASES)
def test_three_thousand_families_that_leave_for_tiers_at_any_step(**case):
    check_families(**case)


def check_families(rate, chunks, loses, **case):
    tiers = DelayedTiers(chunks, loses)
    machine = run_families(placement=hasty_placement(rate), tiers=tiers, **case)
    swaps = machine.schedulers[0].tiers.swaps
    assert swaps.moved == tiers.told
    assert (swaps.moved == 0) if chunks == 0 else swaps.moved <= sum(s.preemptions for s in machine.schedulers)
    assert all(s.preemptions <= MOST_PREEMPTIONS and s.swap is None for s in machine.done)
    swaps.check()


def test_nothing_is_computed_again_of_what_comes_back():
    rows = [(20, 60, [None], [], (0, 0)) for _ in range(30)]
    sizes = {"prefill_tokens": 64, "batch": 12, "period": 1, "lanes": 2, "block": 4, "capacity": [400]}
    placement = hasty_placement(0.3)
    machine = run_families(rows, placement=placement, tiers=DelayedTiers(100), shared=0, schedule="fifo", **sizes)
    prefilled = sum(plan.prefill_tokens for plan in machine.steps)
    assert machine.schedulers[0].tiers.swaps.moved > 20
    assert prefilled == 30 * 20


def test_room_in_tiers_is_bounded_and_counted():
    swaps = Swaps([3, 1], 10, [1.0, 1.0])
    assert swaps.take(0, 5) is None  # nothing is known of prefill yet
    swaps.prefill_seconds = 1.0
    assert swaps.take(0, 5) is None  # out and back takes twice as long
    swaps.prefill_seconds = 2.0
    first, second = swaps.take(0, 11), swaps.take(0, 10)
    assert (first.chunks, second.chunks) == (2, 1) and first.number != second.number
    assert swaps.take(0, 1) is None and swaps.take(1, 11) is None and swaps.held == 2
    swaps.give_back(first)
    swaps.check()
    assert swaps.take(0, 20) is not None
    swaps._free[0] += 1
    with pytest.raises(InvariantViolation, match="free or held"):
        swaps.check()


def test_plans_carry_what_leaves_and_returns():
    table = lambda *rows: np.array(rows, np.int32)  # noqa: E731
    plan = Plan(
        number=7, swap_out=table((0, 3, 11)), release=table((0, 3)), swap_in=table((1, 4, 9, 77), (1, 5, 10, 3))
    )
    wire = np.zeros(wire_length(8, 2), np.int32)
    assert plan.encode(wire) == plan.length
    read = Plan.decode_from(wire)
    for name in ("swap_out", "release", "fork", "swap_in", "decode", "prefill"):
        assert getattr(read, name).tolist() == getattr(plan, name).tolist()
    assert read.changes_slots and not read.runs_model
