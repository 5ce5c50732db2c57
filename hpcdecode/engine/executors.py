"""How a lane step goes through the model: layer by layer, or in one native call.

The S-rank runs the lanes' steps in rotation. A turn of a lane is what it does between two posts of an attention.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hpcdecode.engine.inputs import Inputs
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.exchange.base import SLink, joined
from hpcdecode.exchange.local import LocalLink
from hpcdecode.model import SplitModel
from hpcdecode.model.run.fused_step import FusedStep
from hpcdecode.schedule.step import Step
from hpcdecode.system.timeline import Timeline


class LastSliceInput(NamedTuple):
    """What the last slice takes: the output of the last attention [T, out_columns], and the context."""

    o: Tensor
    context: tuple[Tensor, ...]


class StepExecutor(Protocol):
    """Runs the slices of a step but the last, and its attentions."""

    def suits(self, step: Step) -> bool:
        """Return whether it can run the step, and is worth it."""

    def run(self, lane: int, link: SLink, step: Step, inputs: Inputs) -> Generator[int, None, LastSliceInput]:
        """Yield, turn by turn, the number of turns that went by; return what the last slice takes."""


class LayeredExecutor:
    """Sends q, k and v of every layer over the lane's link, and takes turns with other lanes meanwhile.

    It suits every step. Prompts attend on the S-rank while the R-ranks attend.
    """

    def __init__(self, model: SplitModel, prompts: PromptKvCache, timeline: Timeline):
        self.model, self.prompts, self.timeline = model, prompts, timeline

    def suits(self, step: Step) -> bool:
        """Return True."""
        return True

    def run(self, lane: int, link: SLink, step: Step, inputs: Inputs) -> Generator[int, None, LastSliceInput]:
        """Yield one turn after every post."""
        enter, layers = self.timeline.enter, len(self.model.attends)
        o: Tensor | None = None
        context: tuple[Tensor, ...] = (inputs.ids, inputs.positions, inputs.logits_indices)
        for layer in range(layers):
            enter("slice", lane)
            q, k, v, context = self.model.slice(layer, o, context)
            o = self.model.empty_output(layer, len(q))
            enter("post", lane)
            link.send_qkv(layer, q, k, v, o)
            if step.prefill:
                enter("prefill", lane)
                self._attend_prompts(layer, step, inputs, q, k, v, o)
            yield 1
            enter("wait", lane)
            link.wait()
            enter("take", lane)
            link.recv_output()
        self.prompts.finish(step.prefill)
        assert o is not None, "expected a model with attention layers"
        return LastSliceInput(o, context)

    def _attend_prompts(
        self, layer: int, step: Step, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, o: Tensor
    ) -> None:
        """Attend from the step's prompt tokens; after the last attention only from those whose logits are needed."""
        first = len(step.decode)
        skipped = inputs.skipped_queries if layer == len(self.model.attends) - 1 else None
        q, k, v, o = (x[first:] for x in (q, k, v, o))
        self.prompts.attend(layer, step.prefill, q, k, v, o, self.model.sinks(layer), skipped)


class FusedExecutor:
    """Runs a step without prompts in one call, for a process of both roles with one lane."""

    def __init__(self, fused: FusedStep, model: SplitModel, link: LocalLink, timeline: Timeline):
        self.fused, self.model, self.link, self.timeline = fused, model, link, timeline

    def suits(self, step: Step) -> bool:
        """Return whether the step only decodes, and its threads have about as much to attend to."""
        return bool(step.decode) and not step.prefill and self.fused.suits([s.length for s in step.decode])

    def run(self, lane: int, link: SLink, step: Step, inputs: Inputs) -> Generator[int, None, LastSliceInput]:
        """Yield as many turns as there are layers."""
        self.timeline.enter("slice", lane)
        context: tuple[Tensor, ...] = (inputs.ids, inputs.positions, inputs.logits_indices)
        q, k, v, context = self.model.slice(0, None, context)
        assert self.link.share is not None, "expected a plan"
        slots = self.link.share.whole.decode_slots
        o, context, seconds = self.fused.run(slots, joined(q, k, v), context)
        self.timeline.enter("attend", lane, since=seconds)
        yield len(self.model.attends)
        return LastSliceInput(o, context)


def executors(
    model: SplitModel, links: Sequence[SLink], prompts: PromptKvCache, timeline: Timeline
) -> list[StepExecutor]:
    """Return the executors of an S-rank's lanes, the best first; the last suits every step."""
    found: list[StepExecutor] = []
    if len(links) == 1 and isinstance(links[0], LocalLink):
        fused = FusedStep.of(model, links[0].attention.kv_cache)
        found += [FusedExecutor(fused, model, links[0], timeline)] if fused else []
    return [*found, LayeredExecutor(model, prompts, timeline)]
