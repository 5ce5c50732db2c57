"""The planner's formulas against the simulator, and its choice against all others."""

from __future__ import annotations

import pytest

from hpcdecode.planning import lengths, planner
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import device
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.simulator import SimulatedGroups, sharing, simulate
from hpcdecode.schedule.limits import LaneLimits

ROWS = planner.MeanRows(prompt=50, steps=128)
SLOW_WIRE = Cost(8, [1, 512], [2e-2, 6e-2], [1, 512], [1e-3, 3e-3], 2e-6, 1e-5, 1e-8, 1e-5, 1e-5)
SIZE = ModelSize.alike(
    layers=32,
    layer_weights=6_500_000_000,
    head_weights=131_000_000,
    q_columns=4096,
    k_columns=4096,
    v_columns=4096,
)


@pytest.mark.parametrize(("batch", "lanes", "ranks"), [(64, 2, 1), (64, 2, 3), (128, 3, 2), (128, 4, 4)])
def test_the_steady_state_is_that_of_the_simulator(batch, lanes, ranks):
    plan = planner.predict(SLOW_WIRE, ROWS, batch, lanes, ranks)
    sizes = [batch // lanes + (i < batch % lanes) for i in range(lanes)]
    limits = [LaneLimits(b, ROWS.period, 128, 512, None) for b in sizes]
    found = [
        simulate([SimulatedGroups(SLOW_WIRE, [1 << 20] * ranks, limits)], lengths.fixed(n * batch, 50, 129))
        for n in (4, 12)
    ]
    speed = (found[1].tokens - found[0].tokens) / (found[1].seconds - found[0].seconds)  # without its start and end
    assert plan.tokens_per_second == pytest.approx(speed, rel=0.08)
    assert found[1].peak_load == pytest.approx(plan.load, rel=0.05)


def test_what_rows_share_is_prefilled_and_held_once():
    rows = planner.MeanRows(650, 128, shared=600)
    plan = planner.predict(SLOW_WIRE, rows, 64, 2, 2)
    limits, found = [LaneLimits(32, rows.period, 128, 512, None)] * 2, []
    for n in (4, 12):
        own = lengths.behind(600, lengths.fixed(n * 64, 50, 129))
        found.append(simulate([SimulatedGroups(SLOW_WIRE, [9000] * 2, sharing(limits, own, [9000] * 2))], own))
    speed = (found[1].tokens - found[0].tokens) / (found[1].seconds - found[0].seconds)
    assert plan.tokens_per_second == pytest.approx(speed, rel=0.08)
    assert found[1].peak_load == pytest.approx(plan.load, rel=0.05)
    assert plan.load > 2 * 9000 > plan.batch * rows.held
    alone = planner.MeanRows(650, 128)
    assert planner.predict(SLOW_WIRE, alone, 64, 2, 2).tokens_per_second < 0.8 * plan.tokens_per_second
    assert rows.pairs == alone.pairs - 600 * 601 / 2


@pytest.mark.parametrize("injections", [16, 4])
def test_a_number_of_rows_has_a_start_and_an_end(injections):
    rows = planner.MeanRows(ROWS.prompt, ROWS.steps, 256, injections)
    plan = planner.predict(SLOW_WIRE, rows, 64, 2, 2)
    world = SimulatedGroups(SLOW_WIRE, [1 << 20] * 2, [LaneLimits(32, rows.period, 128, 512, None)] * 2)
    found = simulate([world], lengths.fixed(256, 50, 129))
    assert plan.tokens_per_second == pytest.approx(found.tokens_per_second, rel=0.08)
    assert plan.tokens_per_second < 0.9 * planner.predict(SLOW_WIRE, ROWS, 64, 2, 2).tokens_per_second


def test_the_choice_fits_and_is_nearly_the_fastest():
    cost = of_devices(SIZE, device("a10"), device("epyc-7003"), 12.5e9, 2e-5)
    capacity, ranks = 50_000, 4
    plan = planner.fastest(cost, ROWS, planner.Choice(capacity, ranks, latency=30.0))
    assert plan.load <= planner.FULL * capacity * ranks and plan.latency <= 30.0
    others = [
        planner.predict(cost, ROWS, batch, lanes, ranks)
        for batch in range(8, 3000, 8)
        for lanes in planner.SPLIT_LANES
        if batch * ROWS.peak <= planner.FULL * capacity * ranks
    ]
    best = max(p.tokens_per_second for p in others if p.latency <= 30.0)
    assert plan.tokens_per_second >= 0.95 * best


def test_a_group_has_no_more_sequences_than_rows():
    rows = planner.MeanRows(ROWS.prompt, ROWS.steps, 20)
    assert planner.fastest(SLOW_WIRE, rows, planner.Choice(1 << 20, 2)).batch <= 20


def test_what_fits_nowhere_is_no_choice():
    assert planner.fastest(SLOW_WIRE, ROWS, planner.Choice(100, 2)) is None
