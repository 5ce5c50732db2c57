"""The token-wise part of a model as n + 1 slices, to be run around attention done elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx

from hpcdecode.attention.base import LayerShape
from hpcdecode.model.frontend.checkpoint import Stack, in_checkpoints
from hpcdecode.model.frontend.describe import Description, describe
from hpcdecode.model.frontend.membership import WeightKey
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.plausible import pieces_of
from hpcdecode.model.frontend.rows import empty_rows
from hpcdecode.model.frontend.split import Split
from hpcdecode.model.lower.compile import Compiled, compile_graph, runnable
from hpcdecode.model.lower.packed_weights import PRIVATE
from hpcdecode.model.run.lm_head import LmHead, cut_head
from hpcdecode.model.run.values import Values, layer_shapes
from hpcdecode.system.shared_memory import WeightMemory


class SliceOutput(NamedTuple):
    """What a slice returns for T tokens.

    Attributes:
        q: Queries [T, q_heads * k_dim] in the model's dtype. Rows of q, k and v may be strided.
        k: Keys [T, kv_heads * k_dim].
        v: Values [T, kv_heads * v_dim].
        context: Tensors that the next slice takes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    context: tuple[Tensor, ...]


class BoundSlice(NamedTuple):
    """What runs a slice, and its weights as that takes them."""

    compiled: Compiled
    weights: tuple[Tensor | Stack, ...]


class BoundHead(NamedTuple):
    """The last slice in two: what runs it up to its last GEMM, and that GEMM."""

    before: BoundSlice
    head: LmHead


class SplitModel:
    """The token-wise part of a decoder (S-part). Tokens of any sequences may share a call; none sees another.

    With n layers there are n + 1 slices. `slice` runs those that end at an attention, 0 to n - 1; `logits` runs the
    last. A context is a tuple of tensors to hand on unchanged to the next slice, and to drop after that.

    Args:
        parts: The trace of the model and its slices.
        device: Device that runs the slices.
        weights: Weights by name, or None for a model that is only asked for its shapes.
        slice_bound: Called when the weights of one more slice are in their final form.
        int8: Quantise the weights of projections.
        inductor: Let torch's compiler compile the slices.
        memory: Where to put packed weights.

    Attributes:
        split: The trace of the model and its slices.
        device: Device that runs the slices.
        facts: What the model's config.json says.
        dtype: Type of activations.
        attends: Shapes of the attentions, one a layer.
        vocab_size: Number of logits of a token.
        max_positions: Most tokens of a sequence, or None if the model has no limit.
    """

    def __init__(
        self,
        parts: Split,
        device: torch.device,
        weights: Mapping[WeightKey, Tensor | Stack] | None,
        slice_bound: Callable[[], None] = lambda: None,
        int8: bool = False,
        inductor: bool = False,
        memory: WeightMemory = PRIVATE,
    ):
        self.split = parts
        self.device = device
        self.facts = parts.trace.facts
        self.dtype: torch.dtype = parts.trace.dtype
        self.attends: tuple[LayerShape, ...] = layer_shapes(parts.trace)
        self.vocab_size = tensor_meta(parts.trace.logits).one_token[-1]
        self.max_positions = self.facts.max_positions
        self._slices: list[BoundSlice] = []
        self._sinks: list[Tensor | None] = []
        self._head: BoundHead | None = None
        if weights is not None:
            self._bind(Values(parts.trace, weights, device), slice_bound, int8, inductor, memory)

    def _bind(
        self, values: Values, slice_bound: Callable[[], None], int8: bool, inductor: bool, memory: WeightMemory
    ) -> None:
        compiled = [compile_graph(group.graph, self.device, int8, inductor) for group in self.split.groups]
        for part in self.split.slices:
            own = compiled[part.group]
            self._slices.append(BoundSlice(own, own.weights(values.reader(part.weights), memory)))
            values.forget_weights()
            slice_bound()
        self._head = self._bound_head(memory)
        sinks = [AttendArguments.of(node).sinks for node in self.split.trace.attends]
        self._sinks = [None if n is None else values.tensor(n).to(torch.float32) for n in sinks]

    def _bound_head(self, memory: WeightMemory) -> BoundHead | None:
        if self.device.type != "cpu":
            return None
        compiled, weights = self._slices[-1]
        cut = cut_head(compiled.graph, weights, compiled.recipes, memory)
        return None if cut is None else BoundHead(BoundSlice(runnable(cut.before, []), weights), cut.head)

    @torch.inference_mode()
    def slice(self, i: int, o: Tensor | None, context: tuple[Tensor, ...]) -> SliceOutput:
        """Run one of the slices 0 to n - 1 over T >= 1 tokens, up to the q, k and v of layer i.

        Args:
            i: Index of the slice.
            o: Attention output of layer i - 1, [T, q_heads * v_dim], or None for slice 0.
            context: For slice 0 the token ids, int64 [T], the positions, int64 [T], and the indices of the tokens
                whose logits are needed, int64 [L], L >= 0. Else what slice i - 1 returned.

        Returns:
            q, k, v and the next context. All are inference tensors: not to be changed in place.
        """
        q, k, v, *new = self._call(self._slices[i], i, o, context)
        give = self.split.slices[i].give
        return SliceOutput(q, k, v, tuple([context[j] if j >= 0 else new[~j] for j in give]))

    @torch.inference_mode()
    def logits(self, o: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        """Run the last slice over the tokens whose logits are needed.

        Args:
            o: Attention output of the last layer, [T, q_heads * v_dim].
            context: What slice n - 1 returned.

        Returns:
            The logits [L, vocab].
        """
        o, context = self._needed(o, context)
        if len(o) == 0:
            return o.new_empty(0, self.vocab_size)
        return self._call(self._slices[-1], -1, o, context)[0]

    @torch.inference_mode()
    def argmax(self, o: Tensor, context: tuple[Tensor, ...]) -> Tensor | None:
        """Return the argmax of `logits`, or None if it cannot be found without computing most of them.

        Args:
            o: Attention output of the last layer, [T, q_heads * v_dim].
            context: What slice n - 1 returned.

        Returns:
            The first of the largest logits of each token, int64 [L].
        """
        if self._head is None or self._head.head.pauses():
            return None
        o, context = self._needed(o, context)
        return self._head.head.argmax(self._call(self._head.before, -1, o, context)[0])

    def _needed(self, o: Tensor, context: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the last slice takes, as if the tokens whose logits are needed were all."""
        nodes = self.split.slices[-2].context
        needed = context[nodes.index(self.split.trace.logits_indices)]
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

    def _call(self, bound: BoundSlice, i: int, o: Tensor | None, context: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = [context[j] for j in self.split.slices[i].take]
        return bound.compiled.run(*given if o is None else (o, *given), *bound.weights)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of those weights that lie in a checkpoint's files, mapped into memory: they are used as they are."""
        plain = (
            piece
            for bound in self._slices
            for recipe, weight in zip(bound.compiled.recipes, bound.weights, strict=True)
            if recipe.form == "plain"
            for piece in pieces_of(weight)
            if piece.device.type == "cpu"
        )
        return sum(in_checkpoints({piece.data_ptr(): piece.nbytes for piece in plain}).values())

    def graph(self, i: int) -> fx.Graph:
        """Return what slice `i` runs, a graph ([o,] context..., weights...) -> (q, k, v, context...)."""
        return self._slices[i].compiled.graph

    def weights(self, i: int) -> tuple[Tensor | Stack, ...]:
        """Return the weights of slice `i` as its graph takes them."""
        return self._slices[i].weights

    def empty_output(self, i: int, tokens: int) -> Tensor:
        """Return memory [tokens, q_heads * v_dim] for the attention output of layer `i`, as the next slice reads it."""
        columns = self.attends[i].out_columns
        if self.device.type != "cpu":
            return torch.empty(tokens, columns, dtype=self.dtype, device=self.device)
        return empty_rows(tokens, columns, self.dtype)

    def sinks(self, i: int) -> Tensor | None:
        """Return the attention sinks of layer `i`, float32 [q_heads], or None."""
        return self._sinks[i]

    def describe(self) -> Description:
        """Return slices, groups of equal slices, tensors cut and bytes per token; `render` makes it text."""
        return describe(self.split, self.attends, self.dtype)
