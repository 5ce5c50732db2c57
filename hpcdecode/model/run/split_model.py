"""The token-wise part of a model as n + 1 slices, to be run around attention done elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hpcdecode.attention.recurrent_shapes import RecurrentWeights
from hpcdecode.attention.shapes import MixerShape
from hpcdecode.model.frontend.adapters import with_numbers
from hpcdecode.model.frontend.describe import Description, describe
from hpcdecode.model.frontend.mapped import in_checkpoints
from hpcdecode.model.frontend.membership import WeightKey
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.mixers import rows_of
from hpcdecode.model.frontend.operators import ATTEND
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.rows import empty_rows
from hpcdecode.model.frontend.split import Split
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.lower.compile import Compiled, runnable
from hpcdecode.model.lower.few_bits import NOTHING, Quantised
from hpcdecode.model.lower.packed_weights import PRIVATE
from hpcdecode.model.run.bound_slice import BoundSlice, BoundStretch, CompiledSlice, Summed, alone
from hpcdecode.model.run.head_input import BoundHead, LmHeadInput
from hpcdecode.model.run.lm_head import cut_head
from hpcdecode.model.run.made_weights import MadeWeights
from hpcdecode.model.run.mixers import SliceOutput, layer_shapes, recurrent_weights, with_weights
from hpcdecode.model.run.recorder import Recorder
from hpcdecode.model.run.values import Values, came_in
from hpcdecode.system.shared_memory import WeightMemory

AUTO = "auto"
Part = slice  # SplitModel has a method of that name
_WHOLE = Part(None)


class SplitModel:
    """The token-wise part of a decoder (S-part). Tokens of any sequences may share a call; none sees another.

    With n layers there are n + 1 slices. `slice` runs those that end at an attention, 0 to n - 1; `logits` runs the
    last. A context is a tuple of tensors to hand on unchanged to the next slice, and to drop after that.

    A member of a group has its part of the weights, attention heads and vocabulary. Its slices are run by
    `start_slice` and `start_last`, which yield what the members must add up.

    Args:
        parts: The trace of the model and its slices.
        device: Device that runs the slices.
        weights: Weights by name, or None for a model that is only asked for its shapes.
        slice_bound: Called when the weights of one more slice are in their final form.
        quantised: What projections' weights are packed as. Those that are not quantised are what they were in the
            checkpoint, if that holds the same numbers. None for nothing.
        inductor: Let torch's compiler compile the slices.
        memory: Where to put packed weights.
        layers: Layers whose slices are bound, and with the last of them the last slice; None for all.
        recorder: Records slices for the device (see `RecordedSlices`); None to have them run one operator at a time.
        like: A model of the same checkpoint on the same device, which has some of the weights already.

    Attributes:
        split: The trace of the model and its slices.
        device: Device that runs the slices.
        facts: What the model's config.json says.
        dtype: Type of activations.
        attends: Shapes of the layers at which it is cut, attentions and recurrences. Those of `layers` have weights.
        row_counts: Number of tensors of which a token brings a row to each of them.
        vocab_size: Number of logits of a token.
        max_positions: Most tokens of a sequence, or None if the model has no limit.
        membership: What a member of a group has of the model; None if it is whole.
        layers: Layers whose slices can run.
        head: The LM head, if the largest logit can be found without all of them.
        recorded: The `RecordedSlices`, once there are any.
        hands_hidden: Whether the last slice returns the last hidden states, too.
        rounds_activations: Whether GEMMs round activations to int8.
        made: Weights of the first and the last slice, embeddings and LM head above all.
    """

    def __init__(
        self,
        parts: Split,
        device: torch.device,
        weights: Mapping[WeightKey, Tensor | Stack] | None,
        slice_bound: Callable[[], None] = lambda: None,
        quantised: Quantised | None = None,
        inductor: bool = False,
        memory: WeightMemory = PRIVATE,
        layers: range | None = None,
        recorder: Recorder | None = None,
        like: SplitModel | None = None,
    ):
        self.split = parts
        self.device, self.recorder = device, recorder
        self.recorded: object | None = None
        self.hands_hidden = parts.hidden
        self.facts = parts.trace.facts
        self.dtype: torch.dtype = parts.trace.dtype
        self.attends: tuple[MixerShape, ...] = layer_shapes(parts.trace)
        self.row_counts = [len(rows_of(mixer)) for mixer in parts.trace.attends]
        self.vocab_size = tensor_meta(parts.trace.logits).one_token[-1]
        self.max_positions = self.facts.max_positions
        self.membership = parts.trace.membership
        self.layers = range(len(self.attends)) if layers is None else layers
        self._slices: dict[int, BoundSlice] = {}
        self._sinks: dict[int, Tensor | None] = {}
        self._recurrent: dict[int, RecurrentWeights] = {}
        self.head: BoundHead | None = None
        self.rounds_activations = False
        self.made = MadeWeights()
        if weights is not None:
            self._bind(Values(parts.trace, weights, device), slice_bound, quantised, inductor, memory, like)

    def _bind(
        self,
        values: Values,
        slice_bound: Callable[[], None],
        quantised: Quantised | None,
        inductor: bool,
        memory: WeightMemory,
        like: SplitModel | None,
    ) -> None:
        before = MadeWeights() if like is None else like.made
        compiled: dict[tuple[int, Quantised], CompiledSlice] = {}
        for i in (*self.layers, *([len(self.attends)] if self.ends else [])):
            part = self.split.slices[i]
            forms = NOTHING
            if quantised is not None:
                forms = quantised._replace(held=came_in(values, part.weights, self.device, self.dtype))
            if (part.group, forms) not in compiled:
                group = self.split.groups[part.group]
                compiled[part.group, forms] = CompiledSlice(group.graph, self.device, forms, inductor, group.rows)
            made = before.reader(values, part.weights)
            self._slices[i] = compiled[part.group, forms].bound(values.reader(part.weights), memory, made)
            if i in (0, len(self.attends)):
                self.made.add(values, part.weights, self._slices[i])
            values.forget_weights()
            slice_bound()
        self.rounds_activations = any(c.rounds for c in compiled.values())
        self.head = self._bound_head(memory, None if like is None else like.head)
        shapes = list(self.attends)
        for i in self.layers:
            mixer = self.split.trace.attends[i]
            shapes[i] = with_weights(shapes[i], mixer, values.tensor)
            if mixer.target is ATTEND:
                sinks = AttendArguments.of(mixer).sinks
                self._sinks[i] = None if sinks is None else values.tensor(sinks).to(torch.float32)
            else:
                self._recurrent[i] = recurrent_weights(mixer, values.tensor)
        self.attends = tuple(shapes)

    @property
    def ends(self) -> bool:
        """Whether it has the last slice."""
        return self.layers.stop == len(self.attends)

    def _bound_head(self, memory: WeightMemory, like: BoundHead | None) -> BoundHead | None:
        if self.device.type != "cpu" or not self.ends:
            return None
        last = self.last_stretch
        cut = cut_head(
            last.compiled.graph, last.weights, last.compiled.recipes, memory, None if like is None else like.head
        )
        if cut is None:
            return None
        return BoundHead(BoundStretch(last.stretch, runnable(cut.before, []), last.weights), cut.head)

    @property
    def last_stretch(self) -> BoundStretch:
        """The stretch that ends with the logits."""
        return self._slices[len(self.attends)].last

    @torch.inference_mode()
    def slice(self, i: int, o: Tensor | None, context: tuple[Tensor, ...]) -> SliceOutput:
        """Run one of the slices 0 to n - 1 over T >= 1 tokens, up to what they bring to layer i.

        Args:
            i: Index of the slice.
            o: Attention output of layer i - 1, [T, q_heads * v_dim], or None for slice 0.
            context: For slice 0 the token ids, int64 [T], the positions, int64 [T], and the indices of the tokens
                whose logits are needed, int64 [L], L >= 0, and their adapters, int64 [T], or none (see `with_numbers`);
                behind them hidden states, [T, hidden], if the model takes some. Else what slice i - 1 returned.

        Returns:
            Rows for the layer, and the next context. All are inference tensors: not to be changed in place.
        """
        return alone(self.start_slice(i, o, context))

    def start_slice(self, i: int, o: Tensor | None, context: tuple[Tensor, ...]) -> Summed[SliceOutput]:
        """Run a slice as `slice` does; yield what the members of a group must add up."""
        context = with_numbers(self.split.trace, context) if i == 0 else context
        values = yield from self._slices[i].up_to_last(self._inputs(i, o, context))
        made = self._slices[i].last.run(values)
        count, give = self.row_counts[i], self.split.slices[i].give
        rows = tuple([x if x.dtype == self.dtype else x.contiguous().view(self.dtype) for x in made[:count]])
        new = made[count:]
        return SliceOutput(rows, tuple([context[j] if j >= 0 else new[~j] for j in give]))

    @torch.inference_mode()
    def logits(self, o: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        """Run the last slice over the tokens whose logits are needed.

        Args:
            o: Attention output of the last layer, [T, q_heads * v_dim].
            context: What slice n - 1 returned.

        Returns:
            The logits [L, vocab].
        """
        return alone(self.start_last(o, context)).logits()

    def start_last(self, o: Tensor, context: tuple[Tensor, ...], part: Part = _WHOLE) -> Summed[LmHeadInput]:
        """Run the last slice up to its last sum; yield what the members of a group must add up.

        Args:
            o: Attention output of the last layer, [T, q_heads * v_dim].
            context: What slice n - 1 returned.
            part: Those of the tokens whose logits are needed.
        """
        o, context = self._needed(o, context, part)
        inputs = self._inputs(-1, o, context)
        if len(o) == 0:
            none = torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)
            return LmHeadInput(self.last_stretch, self.head, inputs, none)
        values = yield from self._slices[len(self.attends)].up_to_last(inputs)
        return LmHeadInput(self.last_stretch, self.head, values)

    def _needed(self, o: Tensor, context: tuple[Tensor, ...], part: Part) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the last slice takes, as if the tokens of this part whose logits are needed were all."""
        nodes = self.split.slices[-2].context
        needed = context[nodes.index(self.split.trace.logits_indices)][part]
        if len(needed) == len(o):
            return o, context
        rows = []
        for node, x in zip(nodes, context, strict=True):
            if node is self.split.trace.logits_indices:
                rows.append(torch.arange(len(needed), device=needed.device))
            else:
                dim = tensor_meta(node).token_dim
                rows.append(x if dim is None else x.index_select(dim, needed))
        return o[needed], tuple(rows)

    def _inputs(self, i: int, o: Tensor | None, context: tuple[Tensor, ...]) -> list[Tensor]:
        given = [context[j] for j in self.split.slices[i].take]
        return given if o is None else [o, *given]

    @property
    def mapped_bytes(self) -> int:
        """Bytes of those weights that lie in a checkpoint's files, mapped into memory: they are used as they are."""
        pieces = {p.data_ptr(): p.nbytes for bound in self._slices.values() for p in bound.plain_pieces()}
        return sum(in_checkpoints(pieces).values())

    @property
    def whole(self) -> bool:
        """Whether all layers are here and there is nothing to add up: each slice is one graph."""
        return len(self._slices) == len(self.attends) + 1 and all(len(s.stretches) == 1 for s in self._slices.values())

    def compiled(self, i: int) -> Compiled:
        """Return what runs slice `i` of a whole model; slices of one structure share it.

        Its graph is ([o,] context..., weights...) -> (rows..., context...). Those of a member's model are stretches.
        """
        return self._slices[i].last.compiled

    def weights(self, i: int) -> tuple[Tensor | Stack, ...]:
        """Return the weights of slice `i` of a whole model as its graph takes them."""
        return self._slices[i].last.weights

    def empty_output(self, i: int, tokens: int) -> Tensor:
        """Return memory [tokens, q_heads * v_dim] for the attention output of layer `i`, as the next slice reads it."""
        columns = self.attends[i].out_columns
        if self.device.type != "cpu":
            return torch.empty(tokens, columns, dtype=self.dtype, device=self.device)
        return empty_rows(tokens, columns, self.dtype)

    def sinks(self, i: int) -> Tensor | None:
        """Return the attention sinks of layer `i`, float32 [q_heads], or None."""
        return self._sinks.get(i)

    def recurrent_weights(self, i: int) -> RecurrentWeights:
        """Return the weights of layer `i`, which keeps a state, that its R-ranks need."""
        return self._recurrent[i]

    def describe(self) -> Description:
        """Return slices, groups of equal slices, tensors cut and bytes per token; `render` makes it text."""
        return describe(self.split, self.attends, self.dtype)
