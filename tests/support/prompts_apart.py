"""A machine whose prompts other ranks prefill, in any number of rounds of the lanes."""

from __future__ import annotations

import random

from hpcdecode.schedule.step import Step
from tests.support.scheduling import Machine


class ApartMachine(Machine):
    """A `Machine` of which steps of prompts end after some rounds; a lane waits as `SRank` does.

    Attributes:
        slowest: rounds that a step of prompts may take.
        under_way: by lane, its step of prompts and the rounds that are left.
        stalls: how often a lane that decodes waited for prompts.
    """

    slowest = 5

    def __init__(self, feed, **sizes):
        super().__init__(feed, apart=True, **sizes)
        self.under_way, self.stalls, self._draw = {}, 0, random.Random(7)

    def _step(self, lane, scheduler):
        if lane in self.stopped:
            return
        if lane in self.under_way and self.under_way[lane][1] <= self.now:
            self._end_prompts(lane)
        while scheduler.must_wait(self.now):
            self._order(lane, scheduler)
            self.stalls += bool(scheduler.decoding)
            self._end_prompts(lane)
        if scheduler.exhausted():
            self.stopped.add(lane)
            self._play(lane, scheduler, Step(scheduler.stop_plan(), [], []))
            return
        step = scheduler.next_step(self.now)
        slots, rest = step.plan.parted()
        self._apply(lane, slots)
        self._order(lane, scheduler)
        busy = rest.runs_model or self.under_way
        self.waits = 0 if busy else self.waits + 1
        assert self.waits <= len(self.schedulers) * (scheduler.limits.period + 2)  # as in SRank
        self._play(lane, scheduler, Step(rest, step.decode, []))

    def _order(self, lane, scheduler):
        """Let a step of prompts begin, if there is one."""
        if (step := scheduler.next_prompts()) is not None:
            assert step.plan.apart and not step.decode
            assert step.plan.prefill_tokens <= scheduler.limits.prefill_tokens
            self._apply(lane, step.plan)
            self.under_way[lane] = step, self.now + self._draw.randint(1, self.slowest)

    def _end_prompts(self, lane):
        scheduler, (step, _) = self.schedulers[lane], self.under_way.pop(lane)
        tokens = [self.stops.get((s.prompt.line, s.sample, len(s.generated)), 7) for s in step.sampled]
        self.done += [s for r in scheduler.update(step, tokens) for s in r.sequences]
