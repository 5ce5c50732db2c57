"""Slices over memory that stays where it is, so that a device can be told once what to do in a step: CUDA graphs.

Launching the kernels of a slice one by one takes a CPU longer than a GPU takes to run them, unless a step has many
hundred tokens. A graph launches them at once. It reads and writes the same memory each time, and has a fixed number of
tokens. So steps are padded to a few sizes. Rows of padding hold what an earlier step left there, or zeros: tokens do
not see each other, so no result depends on them.

What a lane's slices return lies in memory of the lane, and stays valid until the lane's next slice: that must not begin
before the rows have been read on the device's queue. The context of the last of them stays valid until the lane's next
step begins. Lanes share nothing but scratch memory within a slice, which the device runs one at a time.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx

from hpcdecode.model.frontend.adapters import with_numbers
from hpcdecode.model.frontend.meta import TOKENS, Meta, tensor_meta
from hpcdecode.model.lower.buffers import WritingGraph, writing
from hpcdecode.model.run.mixers import SliceOutput
from hpcdecode.model.run.recorder import Recorder, Unrecordable
from hpcdecode.model.run.split_model import SplitModel
from hpcdecode.model.run.step_memory import SlotPart, SlotPlan, Unplaceable

logger = logging.getLogger(__name__)
SIZES = (8, 16, 32, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))  # of padded steps, tokens
MOST_STEPS = 32  # sizes of steps that are recorded at a time, of all lanes together
RECORDED_FROM = 3  # steps of a size: recording one takes as long as launching its kernels many times


class PlacedSlice(NamedTuple):
    """A slice, and where its tensors lie.

    Attributes:
        graph: What runs it.
        inputs: Places of the tensors that it takes.
        buffers: Slots that it writes to.
        rows: Places of what it brings to the layer.
        context: Places of the next slice's context; None for what the step gives as it is.
    """

    graph: WritingGraph
    inputs: Sequence[SlotPart]
    buffers: Sequence[int]
    rows: Sequence[SlotPart]
    context: Sequence[SlotPart | None]


class StepLayout:
    """Where the tensors of all slices but the last lie. Slots are shared by tensors that are not read any more.

    Args:
        model: A whole model.

    Attributes:
        slices: The slices.
        step_inputs: Slots of what the first slice takes, by place; None for what no slice but the last reads.
        outputs: Slot of the output of every layer.
        plan: The slots.

    Raises:
        Unplaceable: If a size varies that is not the number of the step's tokens.
    """

    def __init__(self, model: SplitModel):
        self.plan, self.slices = SlotPlan(), list[PlacedSlice]()
        trace, graphs = model.split.trace, dict[int, WritingGraph]()
        widths = {shape.out_columns for shape in model.attends}
        of_width = {width: self.plan.take(Meta.of(model.dtype, (TOKENS, width))) for width in widths}
        self.outputs = [of_width[shape.out_columns] for shape in model.attends]
        before = trace.step_inputs
        where = {node: self._input(node) for node in before}
        self.step_inputs = list(where.values())
        for i in range(len(model.attends)):
            compiled = model.compiled(i)
            graph = graphs.setdefault(id(compiled), writing(compiled))
            where = self._add(model, i, graph, before, where)
            before = model.split.slices[i].context

    def _input(self, node: fx.Node) -> SlotPart | None:
        about = tensor_meta(node)
        return SlotPart(self.plan.take(about)) if about.shape[0] == TOKENS else None

    def _add(
        self,
        model: SplitModel,
        i: int,
        graph: WritingGraph,
        before: Sequence[fx.Node],
        where: Mapping[fx.Node, SlotPart | None],
    ) -> dict[fx.Node, SlotPart | None]:
        """SlotPart what a slice makes, given where the context before it lies; return where that after it does."""
        part, count = model.split.slices[i], model.row_counts[i]
        taken = [where[before[j]] for j in part.take]
        inputs = [place for place in taken if place is not None]
        if len(inputs) < len(taken):
            raise Unplaceable("a slice that takes the tokens whose logits are needed")
        buffers = [self.plan.take(about) for about in graph.buffers]
        made = [SlotPart(buffers[buffer], columns) for buffer, columns in graph.places]
        after = {
            node: where[before[j]] if j >= 0 else made[count:][~j]
            for node, j in zip(part.context, part.give, strict=True)
        }
        of_output = [SlotPart(self.outputs[i - 1])] if i else []
        self.slices.append(PlacedSlice(graph, [*of_output, *inputs], buffers, made[:count], list(after.values())))
        held = {place.slot for place in where.values() if place} | set(buffers)
        self.plan.release(held - {place.slot for place in after.values() if place})
        return after


class RecordedSlices:
    """The slices of a whole model but the last, recorded for each lane and size of a step once it has come up before.

    Args:
        model: Whole, with its weights.
        recorder: Of its device.
        most: Most tokens of a step.

    Attributes:
        works: Whether slices can be recorded, as far as is known.

    Raises:
        Unplaceable: If the memory of a step cannot be laid out.
    """

    def __init__(self, model: SplitModel, recorder: Recorder, most: int = SIZES[-1]):
        self.model, self.recorder, self.most, self.works = model, recorder, most, True
        self.layout = StepLayout(model)
        self._lanes: dict[int, LaneSlices] = {}
        self._uses: Counter[tuple[int, int]] = Counter()
        self._steps: OrderedDict[tuple[int, int], dict[int, Callable[[], object]]] = OrderedDict()

    @staticmethod
    def of(model: SplitModel) -> RecordedSlices | None:
        """Return the slices of a model, kept with it; None if it has no recorder, or they cannot be recorded."""
        if model.recorder is None or not model.whole:
            return None
        if not isinstance(model.recorded, RecordedSlices):
            try:
                model.recorded = RecordedSlices(model, model.recorder)
            except Unplaceable:
                return None
        return model.recorded

    def suits(self, tokens: int) -> bool:
        """Return whether a step of so many tokens is to be replayed."""
        return self.works and 0 < tokens <= self.most

    def lane(self, lane: int) -> LaneSlices:
        """Return the slices of a lane."""
        if lane not in self._lanes:
            self._lanes[lane] = LaneSlices(self, lane)
        return self._lanes[lane]

    def records(self, lane: int, size: int) -> bool:
        """Count a step of a size; return whether its slices are to be recorded, or have been."""
        self._uses[lane, size] += 1
        return self.works and self._uses[lane, size] >= RECORDED_FROM

    def recorded(self, lane: int, size: int) -> dict[int, Callable[[], object]]:
        """Return what is recorded of a lane's steps of a size, by slice; forget what was used longest ago."""
        found = self._steps.setdefault((lane, size), {})
        self._steps.move_to_end((lane, size))
        while len(self._steps) > MOST_STEPS:
            self._steps.popitem(last=False)
        return found


class LaneSlices:
    """The slices of a lane, over memory of its own.

    Args:
        shared: What all lanes share.
        lane: Number of the lane.
    """

    def __init__(self, shared: RecordedSlices, lane: int):
        self.shared, self.lane = shared, lane
        self._slots = shared.layout.plan.opened(shared.most, shared.model.device)
        self._tokens = self._size = 0
        self._replays = False
        self._given: Sequence[Tensor] = ()

    @torch.inference_mode()
    def begin(self, context: tuple[Tensor, ...]) -> None:
        """Begin a step.

        Args:
            context: As `SplitModel.slice` takes it for slice 0.
        """
        self._given = with_numbers(self.shared.model.split.trace, context)
        self._tokens = len(self._given[0])
        self._size = SIZES[bisect_left(SIZES, self._tokens)]
        self._replays = self.shared.records(self.lane, self._size)
        for place, x in zip(self.shared.layout.step_inputs, self._given, strict=True):
            if place is not None:
                self._rows(place).copy_(x)

    @torch.inference_mode()
    def slice(self, i: int) -> SliceOutput:
        """Run a slice as `SplitModel.slice` does, over what the slice before it made and `output` of its layer."""
        model, placed = self.shared.model, self.shared.layout.slices[i]
        self._work(i)()
        rows = [self._rows(place) for place in placed.rows]
        given = zip(placed.context, model.split.slices[i].context, strict=True)
        context = [self._passed_on(node) if place is None else self._rows(place) for place, node in given]
        return SliceOutput(
            tuple([x if x.dtype == model.dtype else x.contiguous().view(model.dtype) for x in rows]), tuple(context)
        )

    def output(self, layer: int) -> Tensor:
        """Return the memory [T, out_columns] for the output of a layer, from which the next slice takes it."""
        return self._rows(SlotPart(self.shared.layout.outputs[layer]))

    def _work(self, i: int) -> Callable[[], object]:
        """Return what runs a slice: recorded, if the step's size has come up before and that is possible."""
        placed, size = self.shared.layout.slices[i], self._size
        recorded = self.shared.recorded(self.lane, size) if self._replays else {}
        if i in recorded:
            return recorded[i]
        to = [self._slots[slot].tensor(size) for slot in placed.buffers]
        inputs = [self._slots[slot].tensor(size, columns) for slot, columns in placed.inputs]
        work = partial(placed.graph.run, *to, *inputs, *self.shared.model.weights(i))
        if not self._replays or not self.shared.works:
            return work
        try:
            recorded[i] = self.shared.recorder.record(work)
        except Unrecordable as error:
            logger.info(f"slices run one operator at a time, as slice {i} cannot be recorded: {error}")
            self.shared.works = False
            return work
        return recorded[i]

    def _rows(self, place: SlotPart) -> Tensor:
        return self._slots[place.slot].rows(self._size, self._tokens, place.columns)

    def _passed_on(self, node: fx.Node) -> Tensor:
        return self._given[self.shared.model.split.trace.step_inputs.index(node)]
