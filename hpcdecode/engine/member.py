"""An S-rank that is not its group's home: it runs its part of the model, as home orders."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcdecode.engine.choice import executors
from hpcdecode.engine.group_lane import GroupLane, MpiGroupLane
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.programs import PlanOrder, Program, serve
from hpcdecode.exchange.base import SLink
from hpcdecode.model import SplitModel
from hpcdecode.system.memory import give_back
from hpcdecode.system.timeline import Timeline


class Member:
    """Runs a member's lanes until home stops them.

    Args:
        model: with this member's part of the weights.
        links: of the lanes, to the R-ranks that hold this member's attention heads.
        groups: of the lanes.
        prompts: attends from prompt tokens, and holds their K and V meanwhile.
        timeline: of this rank.

    Attributes:
        seconds: that `run` took.
        steps: lane steps.
        peak_prefill_tokens: the most prompt tokens whose K and V were held here.
    """

    def __init__(
        self,
        model: SplitModel,
        links: Sequence[SLink],
        groups: Sequence[MpiGroupLane],
        prompts: PromptKvCache,
        timeline: Timeline,
    ):
        self.model, self.links, self.groups, self.prompt_kv, self.timeline = model, links, groups, prompts, timeline
        *_, self.executor = executors(model, links, self._sharing(), prompts, timeline)  # of those that suit every step
        self.seconds = 0.0
        self.steps = self.peak_prefill_tokens = 0
        self._order = PlanOrder()

    def _sharing(self) -> Sequence[GroupLane]:
        """Return the lanes as slices are shared in them."""
        return self.groups

    def run(self) -> None:
        """Follow home's orders to the end of all lanes."""
        self.timeline.enter("idle")
        before = self.timeline.seconds()
        try:
            with torch.inference_mode():
                serve([self._lane(lane) for lane in range(len(self.links))], self.timeline, oldest_first=True)
        finally:
            self.timeline.enter("other")
            self.seconds = self.timeline.seconds() - before

    def _lane(self, lane: int) -> Program:
        """Run one lane: apply home's plans in their order, and run what they say."""
        enter, group, link = self.timeline.enter, self.groups[lane], self.links[lane]
        while True:
            order = yield from group.receive()
            plan = order.decoded_plan()
            yield "idle", self._order.turn(plan.number)
            self._order.next += 1
            enter("plan", lane)
            link.follow_plan(plan) if group.copy else link.send_plan(plan)
            if not order.tokens:
                self.prompt_kv.finish((), order.forgotten)
                if plan.stop:
                    return
                continue
            inputs = order.inputs().on(self.model.device)
            last = yield from self.executor.run(lane, link, inputs)
            if group.at_home and len(inputs.tokens.logits_indices):
                enter("logits", lane)
                for part in inputs.logits_parts:
                    head = yield from group.summed(self.model.start_last(*last, part))
                    yield from group.largest(head) if inputs.largest else group.logits(head)
                if inputs.state_rows:
                    yield from group.summed(self.model.start_last(*last, inputs.state_part))
            self._count(bool(inputs.parts))

    def _count(self, prefilled: bool) -> None:
        self.steps += 1
        self.peak_prefill_tokens = max(self.peak_prefill_tokens, self.prompt_kv.tokens)
        if prefilled and not self.prompt_kv.tokens:
            self.prompt_kv.shrink()
            give_back()
