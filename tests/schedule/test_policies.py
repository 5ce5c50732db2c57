"""Schedules by their loads and their starts, against the definitions; their machine is that of test_schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdecode.config import SCHEDULES
from hpcdecode.requests.params import SamplingParams
from hpcdecode.schedule.policies import POLICIES
from tests.support.scheduling import ListFeed, Machine, prompts


class Arrivals(ListFeed):
    """Rows that are there from a step on. Rows: (step, prompt tokens, max_tokens), by step."""

    def __init__(self, rows):
        super().__init__(prompts([row[1:] for row in rows]))
        self.steps, self.machine = [row[0] for row in rows], None

    def peek(self):
        """An end of the feed is for good, so a lane waits for the next row rather than ends."""
        return self.prompts[0] if self.prompts and self.arrived(self.prompts[0]) else None

    def arrived(self, prompt):
        return self.steps[prompt.line - 1] <= self.machine.now


class Arriving(Machine):
    def run(self, most=20_000):
        feed = self.schedulers[0].admission.feed
        feed.machine = self
        while len(self.done) + len(feed.refused) < len(feed.steps):
            self.before_step(self.schedulers[0])
            step_of(self)
            self.now += 1
            assert self.now < most, "the job does not end"
        return self

    def before_step(self, scheduler):
        pass


def step_of(machine):
    """One step of lane 0, which goes on where nothing has arrived yet."""
    scheduler = machine.schedulers[0]
    if scheduler.exhausted():
        machine.loads.append(0)
    else:
        machine._step(0, scheduler)


ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=40)


def loaded(rows, schedule="load-control", kind=Arriving, **sizes):
    sizes = {"batch": 12, "period": 4, "steps": 40, "capacity": [100_000], "prefill_tokens": 1000, **sizes}
    return kind(Arrivals(sorted(rows)), schedule=schedule, **sizes).run()


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, load=st.integers(60, 600))
def test_load_control_never_exceeds_its_limit(rows, load):
    machine = loaded(rows, load=load)
    alone = max(p + n - 1 for _, p, n in rows)
    assert max(machine.loads) <= max(load, alone)
    if alone <= load:
        assert max(machine.loads) <= load
    assert len(machine.done) == len(rows)


class Watched(Arriving):
    """Looks, at every step at which the next row waits, whether it could have been admitted."""

    def before_step(self, scheduler):
        self.waiting = None if scheduler.prefilling else scheduler.admission.feed.peek()

    def _step(self, lane, scheduler):
        before = {s.prompt.line for r in scheduler.requests.values() for s in r.sequences}
        super()._step(lane, scheduler)
        row = self.waiting
        lines = {s.prompt.line for s in self.done} | {line for line in scheduler.requests}
        if row is None or row.line in lines or row.line in before:
            return
        assert self.exceeds(scheduler, row) or self.held_back_by_ramp_or_batch(scheduler)

    def exceeds(self, scheduler, row):
        """Whether the loads, step by step, exceed the limit with `row` started in the next step."""
        in_flight = [*scheduler.decoding, *scheduler.ready, *(s for p in scheduler.prefilling for s in p.with_forks)]
        courses = [(s.start_step, s.end_step, s.prompt_length) for s in in_flight]
        courses.append((self.now + 1, self.now + row.params.max_tokens - 1, len(row.token_ids)))
        last = max(end for _, end, _ in courses)
        loads = [
            sum(length + t - start + 1 for start, end, length in courses if start <= t <= end)
            for t in range(self.now + 1, last + 1)
        ]
        return max(loads, default=0) > scheduler.limits.load

    def held_back_by_ramp_or_batch(self, scheduler):
        began, limits = scheduler.admission.policy._began, scheduler.limits
        active = scheduler.active
        periods = max(self.now - began, 0) // limits.period + 1
        target = -(-limits.batch * limits.period * periods // limits.steps)
        return active >= min(limits.batch, target)


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, load=st.integers(80, 400), period=st.sampled_from([4, 40]))
def test_load_control_starts_a_row_as_early_as_a_search_finds_possible(rows, load, period):
    loaded(rows, load=load, period=period, kind=Watched)


def test_load_control_comes_in_by_a_ramp_and_reaches_its_limit():
    batch, period, steps = 32, 4, 32
    limit = batch * (steps + period) // 2 + batch  # each row also holds its one prompt token
    rows = [(0, 1, steps + 1)] * 300
    machine = loaded(rows, batch=batch, period=period, steps=steps, load=limit)
    assert 0.95 * limit <= max(machine.loads) <= limit
    first = [len(p.decode) for p in machine.steps[:steps]]
    assert all(n <= batch * (t + period) / steps + 1 for t, n in enumerate(first))
    mean = sum(machine.loads[2 * steps : 6 * steps]) / (4 * steps)
    assert mean >= 0.85 * limit


def test_load_control_expects_rows_to_stop_as_those_before_them_did():
    rows = prompts([(1, 201)] * 400)
    for row in rows:
        row.params = SamplingParams(max_tokens=201, ignore_eos=True, stop_token_ids=(9,))
    stops = {(line, 0, 20): 9 for line in range(1, 401)}
    sizes = {"batch": 40, "period": 200, "steps": 200, "capacity": [100_000], "load": 600}
    machine = Machine(ListFeed(rows), stops=stops, schedule="load-control", **sizes).run()
    late = machine.loads[len(machine.loads) // 2 : -40]
    assert sum(late) / len(late) > 300  # three rows of 201 tokens, which is what 600 has room for, would read 33
    assert len(machine.done) == 400


def test_static_runs_one_batch_after_the_other():
    machine = Machine(
        ListFeed(prompts([(1, 5 + i % 7) for i in range(40)])),
        batch=8,
        period=2,
        steps=12,
        capacity=[10_000],
        schedule="static",
    ).run()
    sizes = [len(p.decode) for p in machine.steps]
    rises = [t for t in range(1, len(sizes)) if sizes[t] > sizes[t - 1]]
    assert len(rises) == 5 and all(sizes[t] == 8 and sizes[t - 1] == 0 for t in rises)


def test_fifo_admits_whenever_there_is_room():
    machine = Machine(
        ListFeed(prompts([(1, 5 + i % 7) for i in range(80)])),
        batch=8,
        period=8,
        steps=12,
        capacity=[10_000],
        schedule="fifo",
    ).run()
    sizes = [len(p.decode) for p in machine.steps]
    first = sizes.index(8)
    assert set(sizes[first : first + 60]) == {8}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_never_overcommits_and_finishes_every_row(schedule):
    rows = [(0, 1 + 13 * i % 90, 1 + 7 * i % 50) for i in range(60)]
    machine = Machine(
        ListFeed(prompts([row[1:] for row in rows])),
        batch=20,
        period=5,
        steps=50,
        capacity=[300, 200],
        block=16,
        lanes=2,
        schedule=schedule,
        load=400,
    ).run()
    assert sorted(s.prompt.line for s in machine.done) == list(range(1, 61))
    machine.require_empty()


def test_the_job_knows_every_policy():
    assert tuple(POLICIES) == SCHEDULES
