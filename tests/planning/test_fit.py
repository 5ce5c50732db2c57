"""Costs that are fitted to lanes whose costs are known come out as they were put in."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from hpcdecode.planning.cost import Cost
from hpcdecode.planning.fit import Sample, fit, predicted
from hpcdecode.planning.planner import Choice, MeanRows, fastest
from hpcdecode.planning.seen_tokens import WindowTokens
from hpcdecode.planning.steady_load import SteadyLoad
from hpcdecode.planning.step_time import step_seconds

LAYERS = 6
KNOWN = Cost(
    layers=LAYERS,
    slice_tokens=[4, 64, 128, 576],
    slice_seconds=[0.01, 0.03, 0.04, 0.1],
    logits_tokens=[4, 64],
    logits_seconds_at=[0.002, 0.006],
    attend_seconds_per_cached_token=2e-6,
    attend_seconds_per_sequence=1e-4,
    prefill_seconds_per_pair=1e-7,
    wire_seconds_per_token=0.0,
    message_latency_seconds=0.0,
    prefill_seconds_per_step=2e-3,
    attend_seconds_per_step=0.0,
    append_seconds_per_prompt_token=3e-5,
    shared_core_fraction=1.0,
)


def loads(lanes: int) -> list[SteadyLoad]:
    plain = [SteadyLoad(lanes * batch, lanes, 64, 4) for batch in (4, 64, 128)]
    prompts = [SteadyLoad(64 * lanes, lanes, 64, 4, prompt=p, chunk=c) for p, c in ((160, 64), (512, 512))]
    single = [SteadyLoad(batch, 1, context, 4) for batch, context in ((4, 1024), (64, 256), (16, 512))]
    both = [SteadyLoad(64, 2, context, 4) for context in (256, 1024) if lanes > 1]
    return list(dict.fromkeys([*plain, *prompts, *single, *both]))


def measured(cost: Cost, load: SteadyLoad, r_ranks: int) -> list[dict[str, float]]:
    """What a Timeline of every rank would say."""
    step = predicted(cost, load, r_ranks + 1)
    rows = [len(range(i, load.lane_batch, max(r_ranks, 1))) for i in range(max(r_ranks, 1))]
    pairs = load.chunk * (load.prompt + 1) / 2
    s = {
        "slice": cost.body_seconds(load.lane_batch + load.chunk),
        "logits": cost.logits_seconds(load.lane_batch),
        "prefill": cost.pair_seconds(pairs, load.chunk) + cost.prefill_seconds_per_step * bool(load.chunk),
    }
    context = load.context + 1 + (load.steps + 1) / 2
    sequence = float(cost.attention_seconds(context, 1))
    r = [{"attend": n * sequence + cost.attend_seconds_per_step} for n in rows]
    r[0]["append"] = cost.append_seconds_per_prompt_token * load.chunk
    s, *r = ({o: load.lanes * seconds for o, seconds in rank.items()} for rank in (s, *r))
    if not r_ranks:
        return [{**s, **r[0], "step": step}]
    return [{**s, "wait": step - sum(s.values()), "step": step}, *r]


@pytest.mark.parametrize("windows", [{}, {128: 0.5, 400: 0.25}])
def test_one_process(windows):
    saved = [WindowTokens(most, share * 2e-6, share * 1e-7) for most, share in windows.items()]
    known = replace(KNOWN, windows=tuple(saved))
    cost = fit([Sample(load, measured(known, load, 0)) for load in loads(1)], LAYERS, windows=windows)
    assert [one.most for one in cost.windows] == list(windows)
    for one, other in zip(cost.windows, saved, strict=True):
        assert one.skipped_seconds_per_pair == pytest.approx(other.skipped_seconds_per_pair)
        assert one.skipped_seconds_per_cached_token == pytest.approx(other.skipped_seconds_per_cached_token)
    assert cost.slice_tokens == [4, 64, 128, 576] and cost.shared_core_fraction == 1
    for name in (
        "attend_seconds_per_cached_token",
        "attend_seconds_per_sequence",
        "prefill_seconds_per_pair",
        "prefill_seconds_per_step",
        "append_seconds_per_prompt_token",
    ):
        assert getattr(cost, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6)
    assert cost.body_seconds(100) == pytest.approx(KNOWN.body_seconds(100))
    assert cost.logits_seconds(200) == pytest.approx(KNOWN.logits_seconds(200))


@pytest.mark.parametrize("shared", [0.5, 0.7])
def test_ranks_that_share_cores(shared):
    known = replace(KNOWN, shared_core_fraction=shared, attend_seconds_per_step=1e-3)
    samples = [Sample(load, measured(known, load, 2)) for load in loads(2)]
    cost = fit(samples, LAYERS)
    assert cost.shared_core_fraction == pytest.approx(shared, abs=0.05)
    attend, expected = (c.attend_seconds_per_cached_token for c in (cost, known))
    assert attend == pytest.approx(expected, rel=1e-3)
    for load, ranks in samples:
        assert predicted(cost, load, 3) == pytest.approx(ranks[0]["step"], rel=0.1)


def test_ranks_that_share_cores_slow_each_other():
    turn = KNOWN.lane_seconds(64, 0, 0, np.array([32_000, 32_000]), np.array([32, 32]))
    apart, beside = (step_seconds([[turn, turn]], shared) for shared in (0.0, 1.0))
    assert beside == pytest.approx(2 * (turn.s_rank + turn.r_ranks.sum())) and apart < 0.6 * beside


@pytest.mark.parametrize("logits", [[0.002, 0.006, 0.001], [0.003, 0.003, 0.001]])
def test_a_falling_end_of_a_measurement_is_not_gone_on_with(logits):
    """Tiny models have steps of some microseconds, and noise may make a larger batch the faster one.

    No batch beyond the measured ones is predicted to be faster than those, or to take no time at all.
    """
    falling = [0.0101, 0.03, 0.02, 0.01]
    cost = replace(KNOWN, slice_seconds=falling, logits_tokens=[4, 64, 128], logits_seconds_at=logits)
    for seconds, last in ((cost.body_seconds, 576), (cost.logits_seconds, 128)):
        assert 0 < seconds(last) <= seconds(last + 1) <= seconds(100 * last)
    plan = fastest(cost, MeanRows(20, 16), Choice(1 << 20, 1, lanes=(1,)))
    assert plan is not None and 0 < plan.tokens_per_second < 1e6
