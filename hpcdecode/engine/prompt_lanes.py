"""What an S-rank does about prompts that ranks prefill which do nothing else: it orders, awaits and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, time
from typing import Protocol

from torch import Tensor

from hpcdecode.engine.inputs import Inputs
from hpcdecode.engine.prefill_ranks import PrefillLane, PromptsDone
from hpcdecode.engine.programs import Program, Waiting
from hpcdecode.exchange.base import SLink
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.step import Step
from hpcdecode.system.timeline import Timeline


class LaneSteps(Protocol):
    """What an S-rank does in the steps of its lanes: see `SRank`."""

    schedulers: Sequence[Scheduler]
    links: Sequence[SLink]
    timeline: Timeline
    stopping: bool
    prefill_seconds: float

    def announce(self, lane: int, plan: Plan, inputs: Inputs | None, forgotten: Sequence[int]) -> None:
        """Tell the lane's ranks what to do."""

    def numbered(self, plan: Plan) -> Plan:
        """Return a plan with the next number."""

    def sample(
        self, lane: int, inputs: Inputs, logits_of: Callable[[slice, bool], Waiting[Tensor]]
    ) -> Waiting[list[int]]:
        """Return the next token of each of a step's sampled sequences."""

    def take_tokens(self, scheduler: Scheduler, step: Step, tokens: list[int]) -> None:
        """Give the step's sequences their tokens."""


class PromptLanes:
    """The prompts of an S-rank's lanes that other ranks prefill.

    Args:
        steps: of the lanes.
        lanes: the lanes' prompts; none if they are in the lanes' own steps.
    """

    def __init__(self, steps: LaneSteps, lanes: Sequence[PrefillLane]):
        self._steps, self._lanes = steps, lanes

    @property
    def under_way(self) -> bool:
        """Return whether prompts of any lane are."""
        return any(lane.step for lane in self._lanes)

    @property
    def ends(self) -> Waitable:
        """Return what is done once a step of prompts of any lane is."""
        return PromptsDone(self._lanes)

    def programs(self) -> list[Program]:
        """Return the programs that take what is prefilled, by lane."""
        return [self._program(lane) for lane in range(len(self._lanes))]

    def must_wait(self, lane: int, step: int) -> Program:
        """Wait for a lane's prompts if its next step, by number, may not begin before, or the lane ends."""
        if not self._lanes:
            return
        own, scheduler = self._lanes[lane], self._steps.schedulers[lane]
        while (self._steps.stopping and own.step) or scheduler.must_wait(step):
            if not own.step:
                self.order(lane, Plan(), ())
            yield "wait", PromptsDone([own])

    def order(self, lane: int, plan: Plan, forgotten: Sequence[int]) -> Plan:
        """Order a lane's next prompts, if there are some and none are under way; return what is left of `plan`.

        Args:
            lane: the lane.
            plan: of its next step; slots that it frees or forks are told before.
            forgotten: keys of prefixes and prompts whose K and V are not needed any more.
        """
        if not self._lanes:
            return plan
        steps, own = self._steps, self._lanes[lane]
        own.forget(forgotten)
        step = steps.schedulers[lane].next_prompts()
        if step is None:
            return plan
        slots, rest = plan.parted()
        if slots.changes_slots:
            steps.announce(lane, slots, None, ())
        step.stamp_queued(time())
        numbered = steps.numbered(step.plan)
        own.order(numbered, step)
        steps.links[lane].send_plan(numbered)
        return rest

    def close(self, lane: int, plan: Plan) -> None:
        """End a lane with its stop plan."""
        if self._lanes:
            self._lanes[lane].close(plan)

    def _program(self, lane: int) -> Program:
        """Take the answers to a lane's prompts, and sample from their logits."""
        steps, own, scheduler = self._steps, self._lanes[lane], self._steps.schedulers[lane]
        while True:
            yield "idle", own.begins
            step, inputs = own.step, own.inputs
            if step is None or inputs is None:
                return
            tokens: list[int] = []
            if len(inputs.model.tokens.logits_indices):
                tokens = yield from steps.sample(lane, inputs, partial(_answered, own))
            else:
                yield from own.answer()
            steps.timeline.enter("commit", lane)
            steps.prefill_seconds += perf_counter() - own.begun
            own.complete()
            steps.take_tokens(scheduler, step, tokens)


def _answered(lane: PrefillLane, part: slice, largest: bool) -> Waiting[Tensor]:
    """Return what comes for a part of the logits: they, or the largest ones' tokens if no more is needed."""
    (answer,) = yield from lane.answer()
    return answer
