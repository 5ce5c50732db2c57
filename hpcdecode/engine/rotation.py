"""A lane step that goes from copy to copy of the model (Lamina's rotational staggered pipelining)."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdecode.engine.executors import (
    LastSliceInput,
    PromptExecutor,
)
from hpcdecode.engine.group_lane import MpiGroupLane, SliceInput
from hpcdecode.engine.model_inputs import ModelInputs
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.programs import Waiting
from hpcdecode.exchange.base import SLink
from hpcdecode.model import SplitModel
from hpcdecode.system.timeline import Timeline


class RotatingExecutor(PromptExecutor):
    """Runs those slices of a step that the route gives to this copy, and hands on to the next copy in between.

    The R-ranks send the output of an attention to the copy that runs the slice behind it. What else that slice takes,
    the context and the output of prompts' attention, goes from copy to copy meanwhile.
    """

    def __init__(self, model: SplitModel, groups: Sequence[MpiGroupLane], prompts: PromptKvCache, timeline: Timeline):
        super().__init__(model, prompts, timeline)
        self.groups = groups

    def suits(self, inputs: ModelInputs) -> bool:
        """Return True."""
        return True

    def run(self, lane: int, link: SLink, inputs: ModelInputs) -> Waiting[LastSliceInput]:
        """Yield what comes from R-ranks and other copies; return what the last slice takes, on home."""
        enter, group = self.timeline.enter, self.groups[lane]
        route, last = group.route, len(self.model.attends)
        given = SliceInput(None, inputs.tokens.context)
        for number in route.visits(lane, group.copy):
            if number and route.copy(lane, number - 1) != group.copy:
                given = yield from self._taken(lane, link, inputs, number)
            elif number:
                yield "wait", link
                enter("take", lane)
                link.recv_output()
            if number == last:
                break
            enter("slice", lane)
            rows, context = yield from group.summed(self.model.start_slice(number, *given))
            o, after = self.model.empty_output(number, len(rows[0])), route.copy(lane, number + 1)
            enter("post", lane)
            if after == group.copy:
                link.send_rows(number, rows, o)
            else:
                link.send_away(number, rows)
                group.send(after, context)
            if inputs.parts and not link.answers_prompts(number):
                enter("prefill", lane)
                self.attend_prompts(number, inputs, rows, o)
                if after != group.copy:
                    group.send(after, [o[inputs.decodes :]])
            if after != group.copy:
                yield "wait", link  # a device may send later; nobody looks after it once this lane waits elsewhere
            given = SliceInput(o, context)
        self.prompts.finish(inputs.parts, inputs.forgotten)
        assert given.o is not None, "expected a model with attention layers"
        return LastSliceInput(given.o, given.context)

    def _taken(self, lane: int, link: SLink, inputs: ModelInputs, number: int) -> Waiting[SliceInput]:
        """Return what slice `number` takes, whose attention and context come from the copy before."""
        group, device = self.groups[lane], self.model.device
        before = group.route.copy(lane, number - 1)
        o = self.model.empty_output(number - 1, len(inputs.tokens.ids))
        link.expect_output(number - 1, o)
        context = yield from group.receive_from(before, device)
        if inputs.parts and not link.answers_prompts(number - 1):
            (of_prompts,) = yield from group.receive_from(before, device)
            o[inputs.decodes :] = of_prompts
        yield "wait", link
        self.timeline.enter("take", lane)
        link.recv_output()
        return SliceInput(o, tuple(context))
