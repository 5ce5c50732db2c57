"""The simulator against the scheduler that jobs run, its cost of a step event by event, and its formulas."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcdecode.attention.footprint import Footprint
from hpcdecode.config import SCHEDULES
from hpcdecode.planning import lengths
from hpcdecode.planning.cost import Cost, LaneSeconds
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import device
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.planning.simulated_lane import SimulatedLane
from hpcdecode.planning.simulator import SimulatedGroups, sharded, simulate
from hpcdecode.planning.step_time import step_seconds
from hpcdecode.requests.params import SamplingParams
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.optimistic import OptimisticPlacement
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.spread import Spread
from tests.support.preemption import HastyPlacement
from tests.support.scheduling import ListFeed, Machine, prompts

MOST_SEEN = (20, 50)


def beyond_of(by_rank):
    """For each of MOST_SEEN, by R-rank: tokens of sequences beyond it, and those that have any."""
    above = [[[n - most for n in lengths if n > most] for lengths in by_rank] for most in MOST_SEEN]
    return [([sum(own) for own in ranks], [len(own) for own in ranks]) for ranks in above]


COST = Cost(2, [1, 512], [1e-3, 2e-3], [1, 512], [1e-4, 2e-4], 1e-7, 1e-6, 1e-10, 1e-6, 1e-5)


ROWS = [(73, 13, 13), (67, 16, 9), (20, 14, 13), (1, 1, 1), (1, 1, 1), (56, 2, 2), (36, 2, 1), (1, 1, 1)]


@example(ROWS, "fixed-f", 7, 1, [220, 200], OptimisticPlacement, None, Spread(0, 1), 0)  # one leaves in its prefill
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30),
    schedule=st.sampled_from(SCHEDULES),
    period=st.integers(1, 9),
    lanes=st.integers(1, 2),
    capacity=st.lists(st.integers(50, 125).map(lambda blocks: 4 * blocks), min_size=1, max_size=3),
    kind_of_placement=st.sampled_from([Placement, OptimisticPlacement, HastyPlacement]),
    shared=st.none() | st.lists(st.integers(0, 80), min_size=30, max_size=30),
    spread=st.builds(Spread, st.sampled_from([0, 40]), st.integers(1, 6)),
    room=st.sampled_from([0, 60, 1000]),
)
def test_what_is_simulated_is_what_runs(
    rows, schedule, period, lanes, capacity, kind_of_placement, shared, spread, room
):
    """Rows: prompt, max_tokens, tokens before a stop. The load of every lane in every step, and every row's end."""
    new = [min(most, n) for _, most, n in rows]
    kind = {"schedule": schedule, "load": 300, "spread": spread, "prefix_room": room}
    feed, begun, tokens = ListFeed(prompts([row[:2] for row in rows])), [], 400 if shared else 0
    for row, common in zip(feed.prompts, shared or [0] * len(rows), strict=False):
        begun = row.token_ids = (begun[:common] + [row.line] * len(row.token_ids))[: len(row.token_ids)]
        row.params = SamplingParams(max_tokens=row.params.max_tokens, ignore_eos=True, stop_token_ids=(9,))
    stops = {(line, 0, n - 1): 9 for line, (n, (_, most, _)) in enumerate(zip(new, rows, strict=True), 1) if n < most}
    sizes = {"batch": 9, "period": period, "steps": 30, "capacity": capacity, "lanes": lanes, "block": 4}
    machine = Machine(feed, stops=stops, placement=kind_of_placement, shared=tokens, **sizes, **kind).run()
    prompt, most, _ = np.array(rows).T
    alike = None if shared is None else np.array(shared[: len(rows)])
    simulated = SimulatedFeed(lengths.Lengths(prompt, np.array(new), most, np.zeros(len(rows)), alike))
    placement = kind_of_placement(capacity, Footprint(4), lanes)
    limits = LaneLimits(9, period, 30, 64, None, tokens, **kind)
    sim = [SimulatedLane(lane, simulated, placement, limits, MOST_SEEN) for lane in range(lanes)]
    loads, ended, prefilled, beyond = [], [], 0, []
    for now in range(10_000):
        if all(lane.exhausted() for lane in sim):
            break
        works = [lane.step(now) for lane in sim]
        loads += [int(w.attention_load.sum()) for w in works]
        ended += [row for w in works for row in w.ended]
        prefilled += sum(w.prompt_tokens for w in works)
        beyond += [[(b.tokens.tolist(), b.queries.tolist()) for b in w.beyond] for w in works]
    assert sum(loads) == sum(machine.loads) and max(loads) == max(machine.loads)
    assert prefilled == sum(plan.prefill_tokens for plan in machine.steps)
    if lanes == 1:
        assert loads == machine.loads[: len(loads)]
        assert beyond == [beyond_of(by_rank) for by_rank in machine.lengths[: len(loads)]]
    assert sorted(ended) == sorted(s.prompt.line - 1 for s in machine.done)
    if lanes == 1:
        assert sim[0].preemptions == machine.schedulers[0].preemptions
        assert sim[0].recomputed == machine.schedulers[0].preempted_tokens
    placement.check()


@pytest.mark.parametrize(("period", "steps"), [(1, 32), (4, 32), (8, 64)])
def test_the_load_of_fixed_f_peaks_at_half_the_static_load(period, steps):
    batch, prompt = 32, 7
    world = SimulatedGroups(COST, [1 << 20, 1 << 20], [LaneLimits(batch, period, steps, 64, None)])
    outcome = simulate([world], lengths.fixed(400, prompt, steps + 1))
    assert outcome.peak_load == batch * prompt + batch * (steps + period) // 2
    assert outcome.tokens == 400 * (steps + 1)
    static = SimulatedGroups(COST, world.capacity, [LaneLimits(batch, period, steps, 64, None, schedule="static")])
    assert simulate([static], lengths.fixed(400, prompt, steps + 1)).peak_load == batch * (prompt + steps)


@settings(max_examples=60, deadline=None)
@given(
    s=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    r=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=2, max_size=2),
    wait=st.integers(0, 20),
)
def test_a_step_takes_what_its_events_take_or_little_less(s, r, wait):
    """Layer by layer: the S-rank visits the lanes in rotation, R-ranks serve them in order of arrival."""
    layers, ranks = 400, np.array(r)[:, : len(s)]
    back, s_free, r_free = [0.0] * len(s), 0.0, np.zeros(len(ranks))
    for _ in range(layers):
        for lane, own in enumerate(s):
            s_free = max(s_free, back[lane]) + own
            arrived = s_free + wait / 2
            r_free = np.maximum(r_free, arrived) + ranks[:, lane]
            back[lane] = float(r_free.max()) + wait / 2
    turns = [LaneSeconds(layers * own, layers * ranks[:, lane], 0.0, layers * wait) for lane, own in enumerate(s)]
    assert 0.999 < max(back) / step_seconds([turns]) < 1.25


def test_rows_arrive_wait_and_are_all_done():
    rows = lengths.poisson(lengths.lognormal(300, 40, 60, 200, 1), 200.0, 2)
    world = SimulatedGroups(COST, [5000], [LaneLimits(16, 4, 60, 64, None, schedule="fifo")] * 2)
    outcome = simulate([world], rows)
    assert outcome.rows == 300 and not outcome.refused and np.isfinite(outcome.latency).all()
    assert outcome.tokens == rows.new.sum()
    assert outcome.seconds >= rows.arrival[-1] and (outcome.latency > 0).all()
    assert outcome.s_seconds <= outcome.seconds and outcome.r_seconds <= outcome.seconds
    parts = sharded(partial(simulate, [world]), rows, 3)
    assert parts.rows == 300 and parts.tokens == outcome.tokens and len(parts.latency) == 300


def test_a_row_that_fits_nowhere_is_refused():
    outcome = simulate([SimulatedGroups(COST, [50], [LaneLimits(4, 2, 10, 64, None)])], lengths.fixed(3, 60, 5))
    assert (outcome.rows, outcome.refused) == (0, 3)


def test_costs_follow_the_data_sheets():
    size = ModelSize.alike(
        layers=2,
        layer_weights=10_000_000,
        head_weights=1_000_000,
        q_columns=512,
        k_columns=128,
        v_columns=128,
    )
    cost = of_devices(size, device("a10"), device("epyc-7003"), link_bytes_per_second=1e9, message_latency_seconds=1e-5)
    assert cost.body_seconds(1) == pytest.approx(2e7 / (0.8 * 600e9))  # bound by reading the weights
    assert cost.body_seconds(20_000) == pytest.approx(2e7 * 20_000 / (0.7 * 125e12), rel=1e-6)
    assert cost.attend_seconds_per_cached_token == pytest.approx(2 * 2 * 256 / (0.8 * 409.6e9))
    assert cost.wire_seconds_per_token == pytest.approx((2 + 2 / 4) * 2 * 512 * 2 / 1e9)  # (2 + 2/G)*e*d a layer


def test_sizes_are_those_of_the_checkpoint(checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama3"))
    size, config = ModelSize.from_directory(str(checkpoint("llama3"))), model.config
    assert (
        size.layer_weights == sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()
    )
    (shape,) = set(size.shapes)
    assert size.layers == config.num_hidden_layers and size.hidden == config.hidden_size
    assert shape.k_columns == config.num_key_value_heads * config.head_dim
