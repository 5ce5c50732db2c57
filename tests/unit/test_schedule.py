"""The fixed-F injector over many steps, without a model: what is in flight, and that no R-rank overflows."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcdecode.data.tokens import Prompt
from hpcdecode.sampling.params import SamplingParams
from hpcdecode.schedule.auto import choose
from hpcdecode.schedule.injector import Injector, Limits, Step
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan, wire_length
from hpcdecode.schedule.stops import Stops


class ListFeed:
    def __init__(self, prompts):
        self.prompts, self.refused = deque(prompts), []

    def peek(self):
        return self.prompts[0] if self.prompts else None

    def pop(self):
        return self.prompts.popleft()

    def refuse(self, prompt, reason):
        self.prompts.popleft()
        self.refused.append((prompt.line, reason))


def prompts(lengths):
    """(prompt tokens, max_tokens) of each row."""
    return [
        Prompt(line=i + 1, id=str(i), token_ids=[1] * p, params=SamplingParams(max_tokens=n, ignore_eos=True))
        for i, (p, n) in enumerate(lengths)
    ]


class Machine:
    """R-ranks reduced to their token counts, and an S-rank that runs the lanes in rotation."""

    def __init__(self, feed, *, batch, period, steps, capacity, block=1, lanes=1, prefill_tokens=64, stops=None):
        self.block, self.capacity, self.stops = block, capacity, stops or {}
        self.placement = Placement(capacity, block, lanes)
        limits = Limits(batch, period, steps, prefill_tokens, None)
        self.injectors = [Injector(lane, feed, self.placement, limits) for lane in range(lanes)]
        self.lengths = [{} for _ in capacity]  # (lane, slot) -> tokens
        self.now, self.done, self.loads, self.steps = 0, [], [], []
        self.stopped = set()

    def run(self, most=10_000):
        while len(self.stopped) < len(self.injectors):
            for lane, injector in enumerate(self.injectors):
                self._step(lane, injector)
            self.now += 1
            assert self.now < most, "the job does not end"
        return self

    def _step(self, lane, injector):
        if lane in self.stopped:
            return
        if injector.exhausted():
            self.stopped.add(lane)
            step = Step(injector.stop_plan(), [], [])
        else:
            step = injector.next_step(self.now)
        wire = np.zeros(wire_length(injector.limits.slots), np.int32)
        step.plan.encode(wire)
        plan = Plan.decode_from(wire)
        for rank, slot in plan.release:
            del self.lengths[rank][lane, slot]
        for rank, slot in plan.decode:
            self.lengths[rank][lane, slot] += 1
        for rank, slot, count in plan.prefill:
            self.lengths[rank][lane, slot] = self.lengths[rank].get((lane, slot), 0) + count
        for held, capacity in zip(self.lengths, self.capacity, strict=True):
            assert sum(-(-n // self.block) * self.block for n in held.values()) <= capacity
        self.loads.append(sum(s.length + 1 for s in injector.decoding))
        self.steps.append(plan)
        tokens = [self.stops.get((s.prompt.line, len(s.generated)), 7) for s in step.sampled]
        for sequence in step.decode:
            assert self.lengths[sequence.rank][lane, sequence.slot] == sequence.length + 1
        self.done += injector.commit(step, tokens, Stops())


@pytest.mark.parametrize(("period", "steps"), [(1, 32), (4, 32), (8, 32), (32, 32)])
def test_steady_load_peaks_at_half_of_the_static_load(period, steps):
    batch = 32
    # A prompt token yields the first token, so a row decodes in max_tokens - 1 steps.
    machine = Machine(
        ListFeed(prompts([(1, steps + 1)] * 200)), batch=batch, period=period, steps=steps, capacity=[10_000]
    ).run()
    steady = machine.loads[3 * steps : 6 * steps]
    # Each sequence also holds its one prompt token.
    assert max(steady) - batch == batch * (steps + period) // 2
    assert all(len(s.generated) == steps + 1 for s in machine.done)


def test_prompts_of_a_period_are_spread_over_its_steps():
    feed = ListFeed(prompts([(40, 33)] * 64))
    machine = Machine(feed, batch=16, period=8, steps=32, capacity=[100_000], prefill_tokens=64).run()
    steady = [p.prefill_tokens for p in machine.steps[40:80]]
    assert set(steady) == {20}  # 4 prompts of 40 tokens over 8 steps


def test_early_ends_are_replaced_at_the_next_injection():
    stops = {(line, 3): 9 for line in range(1, 5)}
    rows = prompts([(1, 33)] * 60)
    for row in rows:
        row.params = SamplingParams(max_tokens=33, ignore_eos=True, stop_token_ids=(9,))
    machine = Machine(ListFeed(rows), batch=8, period=4, steps=32, capacity=[10_000], stops=stops).run()
    assert sorted(s.prompt.line for s in machine.done) == list(range(1, 61))
    assert [s.finish_reason for s in machine.done[:4]] == ["stop"] * 4
    assert max(len(p.decode) for p in machine.steps) == 8


def test_a_row_that_fits_nowhere_is_refused():
    feed = ListFeed(prompts([(10, 5), (90, 20), (10, 5)]))
    machine = Machine(feed, batch=4, period=1, steps=5, capacity=[100, 100]).run()
    assert [s.prompt.line for s in machine.done] == [1, 3]
    assert feed.refused[0][0] == 2 and "--kv-memory" in feed.refused[0][1]


def test_sequences_are_spread_over_r_ranks_by_load():
    machine = Machine(ListFeed(prompts([(20, 21)] * 24)), batch=12, period=20, steps=20, capacity=[10_000] * 3).run()
    ranks = [s.rank for s in machine.done[:12]]
    assert sorted(ranks.count(r) for r in range(3)) == [4, 4, 4]


@example(rows=[(1, 22, None), (120, 60, None)], batch=1, period=1, lanes=2, block=1, capacity=[200])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(  # prompt tokens, max_tokens, the position of a stop token
        st.tuples(st.integers(1, 120), st.integers(1, 60), st.none() | st.integers(0, 30)), min_size=1, max_size=40
    ),
    batch=st.integers(1, 12),
    period=st.integers(1, 20),
    lanes=st.integers(1, 3),
    block=st.sampled_from([1, 16]),
    capacity=st.lists(st.integers(200, 600), min_size=1, max_size=3),
)
def test_every_row_is_done_once_and_no_r_rank_overflows(rows, batch, period, lanes, block, capacity):
    stops = {(line, stop): 9 for line, (*_, stop) in enumerate(rows, 1)}
    feed = ListFeed(prompts([row[:2] for row in rows]))
    for row in feed.prompts:
        row.params = SamplingParams(max_tokens=row.params.max_tokens, ignore_eos=True, stop_token_ids=(9,))
    machine = Machine(
        feed, batch=batch, period=period, steps=30, capacity=capacity, block=block, lanes=lanes, stops=stops
    ).run()
    lines = sorted([s.prompt.line for s in machine.done] + [line for line, _ in feed.refused])
    assert lines == list(range(1, len(rows) + 1))
    assert not any(machine.placement._held) and not any(machine.lengths)


def test_auto_starts_a_small_job_at_once_and_staggers_a_large_one():
    few, many = prompts([(50, 64)] * 10), prompts([(50, 64)] * 256)
    assert choose(None, None, few, True, 64, 100_000) == (10, 64, 64)
    batch, period, steps = choose(None, None, many, False, 64, 10_000)
    assert (period, steps) == (4, 64)
    assert batch * (50 + (steps + period) / 2) <= 10_000
    assert choose(8, 7, many, False, 64, 10_000)[:2] == (8, 7)
