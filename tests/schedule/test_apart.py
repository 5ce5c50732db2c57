"""Prompts that other ranks prefill while lanes decode: however long they take, no R-rank overflows and all rows end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdecode.schedule.optimistic import OptimisticPlacement
from hpcdecode.schedule.placement import Placement
from tests.support.families import SCHEDULED, run_families
from tests.support.preemption import hasty_placement
from tests.support.prompts_apart import ApartMachine
from tests.support.scheduling import ListFeed, Machine, prompts

CASES = {
    **SCHEDULED,
    "slowest": st.sampled_from([1, 4, 25]),
    "rate": st.none() | st.sampled_from([0.0, 0.1, 0.5]),
}


@settings(max_examples=20, deadline=None)
@given(**CASES)
def test_families_are_done_once(**case):
    check_families(**case)


@pytest.mark.full
@settings(max_examples=5000, deadline=None)
@given(**CASES)
def test_five_thousand_families(**case):
    check_families(**case)


def check_families(slowest, rate, **case):
    kind = type("Slow", (ApartMachine,), {"slowest": slowest})
    placement = Placement if rate is None else hasty_placement(rate)
    run_families(kind=kind, placement=placement, **case)


SIZES = {"batch": 8, "period": 4, "steps": 31, "capacity": [100_000], "prefill_tokens": 64}


def machine_of(slowest, kind=ApartMachine, **more):
    made = type("Slow", (kind,), {"slowest": slowest})(ListFeed(prompts([(60, 32)] * 40)), **{**SIZES, **more})
    return made.run()


@pytest.mark.parametrize("schedule", ["fixed-f", "fifo"])
def test_decoding_goes_on_while_prompts_are_slow(schedule):
    machine = machine_of(20, schedule=schedule)
    assert machine.stalls == 0 and len(machine.done) == 40
    assert all(plan.prefill_tokens == 0 for plan in machine.steps)  # those of the lanes' own steps
    machine.require_empty()


def test_a_prompt_that_is_done_early_starts_at_once_if_rows_enter_one_by_one():
    slow, fast = (machine_of(slowest, schedule="fifo") for slowest in (20, 1))
    assert fast.now < 0.6 * slow.now
    beside = machine_of(1, Machine, schedule="fifo")
    assert fast.now <= 1.3 * beside.now


@pytest.mark.parametrize("placement", [Placement, OptimisticPlacement])
def test_a_late_prompt_waits_for_room_or_the_lane_for_it(placement):
    """There is room for few rows, which must not all be long at once."""
    draw = random.Random(1)
    rows = ListFeed(prompts([(draw.randint(1, 40), draw.randint(2, 40)) for _ in range(60)]))
    sizes = {"batch": 4, "period": 2, "steps": 39, "capacity": [75], "placement": placement, "schedule": "fifo"}
    machine = type("Slow", (ApartMachine,), {"slowest": 25})(rows, **{**SIZES, **sizes}).run()
    assert len(machine.done) + len(rows.refused) == 60
    left = sum(scheduler.preemptions for scheduler in machine.schedulers)
    assert machine.stalls > 0 if placement is Placement else machine.stalls <= left
    machine.require_empty()
