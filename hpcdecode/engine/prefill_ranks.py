"""Prompts of a lane that another S-rank prefills (Lamina, section 5.6): both its ends, and the steps under way.

The lane's home orders a step of prompts of a further copy of the model in its group. That copy runs the slices, attends
from the prompts and sends their K and V to the R-ranks; it answers with logits, from which home samples. The plan goes
to the R-ranks from home, among those of the lane's other steps, which go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from hpcdecode.engine.executors import StepEnd
from hpcdecode.engine.group_lane import GroupLane, MpiGroupLane, OneMember
from hpcdecode.engine.inputs import Inputs
from hpcdecode.engine.member import Member
from hpcdecode.engine.programs import Program, Waiting
from hpcdecode.mpi.wait import Waitable
from hpcdecode.ranks.roles import Rank
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.step import Step

_HOME = 0  # home's copy of the model


def prefill_copy(rank: Rank, lane: int) -> int:
    """Return which copy of the model in a rank's group prefills the prompts of a lane."""
    return 1 + lane % (rank.copies - 1)


class PrefillLane:
    """Home's end of a lane's prompts.

    Args:
        group: the lane as the members share it.
        copy: of the model that prefills.
        device: of home's slices.

    Attributes:
        step: that is under way, or None.
        inputs: of that step.
        begun: when it was ordered, in seconds of `perf_counter`.
        closed: whether no more steps come.
        done: number of steps that are done.
    """

    def __init__(self, group: MpiGroupLane, copy: int, device: torch.device):
        self._group, self._copy, self._device = group, copy, device
        self._forgotten: list[int] = []
        self.step: Step | None = None
        self.inputs: Inputs | None = None
        self.begun, self.closed, self.done = 0.0, False, 0

    def forget(self, keys: Sequence[int]) -> None:
        """Have K and V of prompts and prefixes dropped with the next order."""
        self._forgotten += keys

    def order(self, plan: Plan, step: Step) -> None:
        """Have a step run; it waits for nothing."""
        forgotten, self._forgotten = self._forgotten, []
        self.step, self.inputs = step, Inputs(step, self._device, forgotten)
        self.begun = perf_counter()
        self._group.order(plan, self.inputs.on_host, (), [self._copy])

    def answer(self) -> Waiting[list[Tensor]]:
        """Return what comes next: tokens with the largest logits, int64 [L], logits [L, vocab], or nothing."""
        return self._group.receive_from(self._copy, self._device)

    def complete(self) -> None:
        """Take note that the step is done."""
        self.step = self.inputs = None
        self.done += 1

    def close(self, plan: Plan) -> None:
        """End the lane with its stop plan."""
        self.closed = True
        self._group.order(plan, None)

    @property
    def begins(self) -> Waitable:
        """Return what is done once a step is under way, or none will be."""
        return _Begins(self)


def prefill_lanes(rank: Rank, groups: Sequence[MpiGroupLane], device: torch.device) -> list[PrefillLane]:
    """Return home's ends of its lanes' prompts; none if it has no ranks that only prefill.

    Args:
        rank: home.
        groups: its lanes.
        device: of its slices.
    """
    if not rank.prefill:
        return []
    return [PrefillLane(group, prefill_copy(rank, lane), device) for lane, group in enumerate(groups)]


class _Begins:
    def __init__(self, lane: PrefillLane):
        self._lane = lane

    def Test(self) -> bool:
        return self._lane.closed or self._lane.step is not None


class PromptsDone:
    """Is done once one more step of some lanes is.

    Args:
        lanes: the lanes.
    """

    def __init__(self, lanes: Sequence[PrefillLane]):
        self._lanes = lanes
        self._before = self._done

    @property
    def _done(self) -> int:
        return sum(lane.done for lane in self._lanes)

    def Test(self) -> bool:
        """Return whether it is done."""
        return self._done > self._before


class PrefillMember(Member):
    """An S-rank that only prefills: it runs steps of prompts as home orders them, with the arguments of `Member`."""

    def _sharing(self) -> Sequence[GroupLane]:
        """Return lanes of one member: it has the whole model."""
        return [OneMember()] * len(self.links)

    def _lane(self, lane: int) -> Program:
        """Run a lane's prompts, and send home logits or the largest ones' tokens, part by part."""
        enter, group, link = self.timeline.enter, self.groups[lane], self.links[lane]
        own = OneMember()
        while True:
            order = yield from group.receive()
            plan = order.decoded_plan()
            if plan.stop:
                return
            enter("plan", lane)
            link.follow_plan(plan)
            inputs = order.inputs().on(self.model.device)
            last = yield from self.executor.run(lane, link, inputs)
            end = StepEnd(self.model, own, last, self.timeline, lane)
            for part in inputs.logits_parts:
                answer = yield from end.logits(part, inputs.largest)
                group.send(_HOME, [answer.long() if answer.dim() == 1 else answer])
            if not inputs.logits_parts:
                group.send(_HOME, [])
            self._count(prefilled=True)
