"""How a lane step goes through the model: layer by layer, or in one native call.

Executors are parts of lane programs: what they wait for, other lanes may fill with work of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from hpcdecode.attention.base import LayerRows, LayerSeconds
from hpcdecode.attention.shapes import places_of
from hpcdecode.engine.group_lane import GroupLane
from hpcdecode.engine.model_inputs import ModelInputs
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.programs import Waiting
from hpcdecode.exchange.base import SLink, joined
from hpcdecode.exchange.local import LocalLink
from hpcdecode.model import SplitModel
from hpcdecode.model.run.fused_step import FusedStep
from hpcdecode.model.run.head_input import LmHeadInput
from hpcdecode.model.run.mixers import SliceOutput
from hpcdecode.model.run.recorded_slices import RecordedSlices
from hpcdecode.system.timeline import Timeline


class LastSliceInput(NamedTuple):
    """What the last slice takes: the output of the last attention [T, out_columns], and the context."""

    o: Tensor
    context: tuple[Tensor, ...]


class StepEnd:
    """The last slice of a lane's step: logits, part by part, and the hidden states that they are of.

    Args:
        model: Model whose last slice runs.
        group: The lane as members share it.
        last: What the last slice takes.
        timeline: Of this rank.
        lane: For the timeline.

    Attributes:
        hidden: Last hidden states [L, hidden] of each part whose logits were computed, if the model hands them on.
    """

    def __init__(self, model: SplitModel, group: GroupLane, last: LastSliceInput, timeline: Timeline, lane: int):
        self.model, self.group, self.timeline, self._last, self._lane = model, group, timeline, last, lane
        self.hidden: list[Tensor] = []

    def logits(self, part: slice, largest: bool) -> Waiting[Tensor]:
        """Return logits [L, vocab], or the largest ones' tokens, int64 [L], if no more is needed and they are known.

        Args:
            part: Those of the tokens whose logits are needed.
            largest: Whether no more is needed.
        """
        head = yield from self._head(part)
        found = (yield from self.group.largest(head)) if largest else None
        found = (yield from self.group.logits(head)) if found is None else found
        if self.model.hands_hidden:
            self.hidden.append(head.hidden)
        return found

    def states(self, part: slice) -> Waiting[Tensor | None]:
        """Return the last hidden states [L, hidden] of a part whose logits nobody asks for; None if it is empty."""
        if part.start == part.stop:
            return None
        head = yield from self._head(part)
        return head.states()

    def _head(self, part: slice) -> Waiting[LmHeadInput]:
        """Return where the last slice ends for a part of the tokens whose logits are needed."""
        self.timeline.enter("logits", self._lane)
        return (yield from self.group.summed(self.model.start_last(*self._last, part)))


class StepExecutor(Protocol):
    """Runs the slices of a step but the last, those of a stage, and their attentions."""

    def suits(self, inputs: ModelInputs) -> bool:
        """Return whether it can run the step, and is worth it."""

    def run(self, lane: int, link: SLink, inputs: ModelInputs) -> Waiting[LastSliceInput]:
        """Yield what it must wait for; return what the last slice takes."""


class PromptExecutor:
    """What executors have in common whose prompts attend on the S-rank while the R-ranks attend."""

    def __init__(self, model: SplitModel, prompts: PromptKvCache, timeline: Timeline):
        self.model, self.prompts, self.timeline = model, prompts, timeline
        self._places = places_of(model.attends[model.layers.start : model.layers.stop])  # in `prompts`

    def attend_prompts(
        self, layer: int, inputs: ModelInputs, rows: Sequence[Tensor], o: Tensor, beside: LayerRows | None = None
    ) -> LayerSeconds | None:
        """Attend from the step's prompt tokens; after the last attention only from those whose logits are needed.

        Args:
            layer: That attends.
            inputs: Of the step.
            rows: q, k and v of all its tokens.
            o: Output, whose rows of prompts are overwritten.
            beside: What the KV cache on the same threads has to do, as `PromptKvCache.attend` takes it.

        Returns:
            What took how long, as `PromptKvCache.attend`.
        """
        first = inputs.decodes
        skipped = inputs.skipped_queries if layer == len(self.model.attends) - 1 else None
        q, k, v, o = (x[first:] for x in (*rows, o))
        own = self._places[layer - self.model.layers.start]
        return self.prompts.attend(own, inputs.parts, q, k, v, o, self.model.sinks(layer), skipped, beside)


class LayeredExecutor(PromptExecutor):
    """Sends what tokens bring to every layer over the lane's link. It suits every step."""

    def __init__(self, model: SplitModel, groups: Sequence[GroupLane], prompts: PromptKvCache, timeline: Timeline):
        super().__init__(model, prompts, timeline)
        self.groups = groups

    def suits(self, inputs: ModelInputs) -> bool:
        """Return True."""
        return True

    def run(self, lane: int, link: SLink, inputs: ModelInputs) -> Waiting[LastSliceInput]:
        """Yield the link after every post, and what members exchange."""
        enter, group, layers = self.timeline.enter, self.groups[lane], self.model.layers
        o, context = yield from group.take_over(inputs)
        for layer in layers:
            enter("slice", lane)
            rows, context = yield from self.run_slice(lane, layer, o, context)
            o = self.output_of(lane, layer, len(rows[0]))
            self.start_attention(lane, layer, link, inputs, rows, o)
            yield "wait", link
            enter("take", lane)
            link.recv_output()
        self.prompts.finish(inputs.parts, inputs.forgotten)
        assert o is not None, "expected a model with attention layers"
        if not self.model.ends:
            enter("post", lane)
            group.hand_on(o, context)
        return LastSliceInput(o, context)

    def run_slice(self, lane: int, layer: int, o: Tensor | None, context: tuple[Tensor, ...]) -> Waiting[SliceOutput]:
        """Return what a slice of the lane's step makes of the output of the attention before it and the context."""
        return (yield from self.groups[lane].summed(self.model.start_slice(layer, o, context)))

    def output_of(self, lane: int, layer: int, tokens: int) -> Tensor:
        """Return memory [tokens, out_columns] for the output of a layer."""
        return self.model.empty_output(layer, tokens)

    def start_attention(
        self, lane: int, layer: int, link: SLink, inputs: ModelInputs, rows: Sequence[Tensor], o: Tensor
    ) -> None:
        """Send rows, then attend for prompts meanwhile.

        Args:
            lane: For the timeline.
            layer: That attends.
            link: Of the lane.
            inputs: Of the step.
            rows: q, k and v of all its tokens, or what else they bring.
            o: Output of the layer, in part that of R-ranks to come.
        """
        own = layer - self.model.layers.start
        self.timeline.enter("post", lane)
        link.send_rows(own, rows, o)
        if inputs.parts and not link.answers_prompts(own):
            self.timeline.enter("prefill", lane)
            self.attend_prompts(layer, inputs, rows, o)


class RecordedExecutor(LayeredExecutor):
    """Replays slices that were recorded for the lane, over memory of the lane.

    Each slice begins once the rows of the one before have been read: the link has been waited for, or what reads them
    is before it on the device's queue. It suits steps that are not too large.
    """

    def __init__(
        self,
        slices: RecordedSlices,
        model: SplitModel,
        groups: Sequence[GroupLane],
        prompts: PromptKvCache,
        timeline: Timeline,
    ):
        super().__init__(model, groups, prompts, timeline)
        self.slices = slices

    def suits(self, inputs: ModelInputs) -> bool:
        """Return whether steps of this size are recorded."""
        return self.slices.suits(len(inputs.tokens.ids))

    def run_slice(self, lane: int, layer: int, o: Tensor | None, context: tuple[Tensor, ...]) -> Waiting[SliceOutput]:
        """Return what a slice makes of what the lane's memory holds."""
        yield from ()
        own = self.slices.lane(lane)
        if o is None:
            own.begin(context)
        return own.slice(layer)

    def output_of(self, lane: int, layer: int, tokens: int) -> Tensor:
        """Return the lane's memory for the output of a layer."""
        return self.slices.lane(lane).output(layer)


class SideBySideExecutor(LayeredExecutor):
    """Does all attention of a layer in one call, in a process of both roles on CPUs.

    Attention of prompts is bound by arithmetic, that of decode rows by memory. Threads that have nothing left of one
    do the other (packing, FluidInfer 4.2; `native/attn_cpu/region.h` says how). It suits steps with prompts.
    """

    def suits(self, inputs: ModelInputs) -> bool:
        """Return whether the step has prompts."""
        return bool(inputs.parts)

    def start_attention(
        self, lane: int, layer: int, link: SLink, inputs: ModelInputs, rows: Sequence[Tensor], o: Tensor
    ) -> None:
        """Attend for prompts and decode rows."""
        assert isinstance(link, LocalLink), "side by side: expected both roles in this process"
        self.timeline.enter("prefill", lane)
        beside = link.rows_beside(layer - self.model.layers.start, rows, o)
        if seconds := self.attend_prompts(layer, inputs, rows, o, beside):
            self.timeline.enter("append", lane, since=seconds.append + seconds.attend)
            self.timeline.enter("attend", lane, since=seconds.attend)


class FusedExecutor:
    """Runs a step without prompts in one call, for a process of both roles with one lane."""

    def __init__(
        self, fused: FusedStep, model: SplitModel, link: LocalLink, prompts: PromptKvCache, timeline: Timeline
    ):
        self.fused, self.model, self.link, self.prompts, self.timeline = fused, model, link, prompts, timeline

    def suits(self, inputs: ModelInputs) -> bool:
        """Return whether the step only decodes, and its threads have about as much to attend to."""
        assert self.link.share is not None, "expected a plan"
        if not inputs.decodes or inputs.parts:
            return False
        last = np.cumsum(self.link.share.whole.decode_counts) - 1  # rows of sequences, of which drafts take several
        return self.fused.suits(inputs.tokens.positions.numpy()[last].tolist(), inputs.decodes)

    def run(self, lane: int, link: SLink, inputs: ModelInputs) -> Waiting[LastSliceInput]:
        """Yield nothing: it waits for nobody."""
        yield from ()
        self.timeline.enter("slice", lane)
        rows, context = self.model.slice(0, None, inputs.tokens.context)
        assert self.link.share is not None, "expected a plan"
        whole = self.link.share.whole
        o, context, seconds = self.fused.run(whole.decode_slots, whole.decode_counts, joined(*rows), context)
        self.timeline.enter("attend", lane, since=seconds)
        self.prompts.finish((), inputs.forgotten)
        return LastSliceInput(o, context)
