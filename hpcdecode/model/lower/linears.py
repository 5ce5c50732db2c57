"""Merge the projections of one input, and let them take packed weights, as they are, as int8 or in few bits.

GEMMs are those of native/ops_cpu if they are offered on this CPU, else oneDNN's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from hpcdecode.model.frontend.clean import VIEWS
from hpcdecode.model.frontend.head_linear import head_linear
from hpcdecode.model.frontend.held import NOT_HELD
from hpcdecode.model.frontend.meta import Meta, meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_node, results
from hpcdecode.model.frontend.rows import packed_linear
from hpcdecode.model.lower import packed_weights, quantize
from hpcdecode.model.lower.adapters import low_rank, update_size, updated
from hpcdecode.model.lower.expanded import expandable, expanded_weight
from hpcdecode.model.lower.experts import ExpertPacker
from hpcdecode.model.lower.few_bits import ALL_FORMS, BY_INT8, FORMS, NOTHING, Quantised
from hpcdecode.model.lower.group_experts import group_experts
from hpcdecode.model.lower.packed_weights import PackedSize
from hpcdecode.model.lower.projections import Gate, Projection, gate_of, projection
from hpcdecode.model.lower.recipe import Form, Recipe, packed_by_onednn
from hpcdecode.model.lower.weight_graph import WeightGraph

aten = torch.ops.aten
WIDENING = (aten._to_copy.default, aten.type_as.default)


class MergeKey(NamedTuple):
    """What projections that become one have in common: their input, and how they are computed."""

    x: fx.Node
    biased: bool
    transposed: bool
    weights: str | None


def merge_projections(graph: fx.Graph, weights: Quantised = NOTHING, *, ends: bool = True) -> list[Recipe]:
    """Merge and pack the projections of a graph in place.

    Args:
        graph: ([o,] context..., weights...) -> (q, k, v, context...) or (logits,).
        weights: What projections' weights are packed as.
        ends: Whether a slice ends with the graph.

    Returns:
        The recipes of the weights that the graph takes now, in their order.
    """
    return ProjectionMerger(graph, weights, ends).run()


def merge_plainly(graph: fx.Graph, weights: Quantised, *, ends: bool) -> list[Recipe]:
    """Merge the projections of a graph in place for any device, by GEMMs of torch; else as `merge_projections`.

    Weights in few bits are expanded when they are needed. Results of a merged projection are views of columns, which
    lie in the order in which the graph first needs them: those of q, then of k, then of v.
    """
    return ProjectionMerger(graph, weights, ends).run_plain()


class ProjectionMerger:
    """Replaces the projections of `graph` by fewer ones with packed weights."""

    def __init__(self, graph: fx.Graph, weights: Quantised, ends: bool):
        self.graph, self.weights, self._made = graph, weights, WeightGraph(graph)
        made = results(graph)
        self._logits = tensor_meta(made[0]).one_token[-1] if ends and len(made) == 1 else None

    def run(self) -> list[Recipe]:
        """Return the recipes of the weights that the graph takes now, in their order."""
        self._widen()
        ExpertPacker(self._made, self._quantised).run()
        projections = {p.node: p for p in self._projections()}
        for node in self.graph.nodes:
            if (gate := gate_of(node, projections)) is not None:
                self._merge_gated(gate)
        for key, group in self._siblings().items():
            if key.weights == "int8":
                self._merge_int8(_read_by(group[0]), group)
            else:
                self._merge(_read_by(group[0]), group, key.weights)
        for node in [n for n in self.graph.nodes if n.target is head_linear]:
            self._pack_heads(node)
        return self._made.finish()

    def run_plain(self) -> list[Recipe]:
        """Merge siblings as `run` does, by torch's own GEMM over their weights one below the other; group experts."""
        self._widen()
        for key, group in self._siblings().items():
            bits = expandable(group[0], key.weights)
            if len(group) > 1 or bits:
                self._merge_plain(_read_by(group[0]), group, bits)
        group_experts(self._made, self._quantised)
        return self._made.finish()

    def _merge_plain(self, x: fx.Node, group: list[Projection], bits: str | None) -> None:
        biases = self._made.biases(group)
        with self.graph.inserting_before(group[0].node):
            weight = expanded_weight(self._made, group, bits) if bits else self._weight(group, "plain")
            weights = (weight, *([self._made.input(Recipe(biases))] if biases else []))
            whole = self._made.call(aten.linear.default, (x, *weights), _whole(group))
            self._replace(group, whole, lambda part, p: updated(self._made, part, p, packed=False))

    def _widen(self) -> None:
        """Let weights that projections take as float32, such as those of routers, be that from the start."""
        for node in [n for n in self.graph.nodes if n.target in WIDENING and n.args[0] in self._made.recipes]:
            about = meta(node)
            of_linears = all(user.target is aten.linear.default and user.args[1] is node for user in node.users)
            if about is None or about.dtype != torch.float32 or not about.static or not of_linears:
                continue
            own = self._made.input(replace(self._made.recipes[as_node(node.args[0])], wide=True))
            own.meta["about"] = about
            node.replace_all_uses_with(own)
            self.graph.erase_node(node)

    def _pack_heads(self, node: fx.Node) -> None:
        """Replace a projection of each head, and a view of it, by one of packed weights, if there is one."""
        x, weight, seen = as_node(node.args[0]), as_node(node.args[1]), _seen_as(node)
        about, made = tensor_meta(weight), tensor_meta(seen)
        gemm = packed_weights.head_gemm(tensor_meta(x), about, made) if weight in self._made.recipes else None
        if gemm is None:
            return
        packed = PackedSize.of_heads(about)
        with self.graph.inserting_before(node):
            own = self._made.input(Recipe(self._made.recipes[weight].sources, form="packed heads", packed=packed))
            seen.replace_all_uses_with(self._made.call(gemm, (x, own), made))
        for each in dict.fromkeys((seen, node)):
            self.graph.erase_node(each)

    def _projections(self) -> Iterator[Projection]:
        return (p for node in self.graph.nodes if (p := projection(node, self._made.recipes)) is not None)

    def _siblings(self) -> dict[MergeKey, list[Projection]]:
        """Return the projections that may become one, by what they have in common."""
        siblings: dict[MergeKey, list[Projection]] = defaultdict(list)
        for p in self._projections():
            siblings[MergeKey(p.x, p.bias is not None, p.transposed, self._quantised(p))].append(p)
        return siblings

    def _quantised(self, p: Projection) -> str | None:
        """Return what the weight of a projection is packed as: int8, one of few_bits.ALL_FORMS, or None."""
        recipe, to = self._made.recipes[p.weight], self.weights.to
        if recipe.wide:
            return None
        held = self.weights.held[recipe.sources[0]] if self.weights.held else NOT_HELD
        bits = held.by_column if p.transposed else held.by_row
        head = p.width == self._logits and to != "int8"
        if p.width * quantize.MAX_INPUTS_PER_OUTPUT >= tensor_meta(p.x).one_token[-1] and not head and to is not None:
            same = bits is not None and to in FORMS and ALL_FORMS[bits].native == FORMS[to].native
            bits = bits if same else to
        return BY_INT8.get(bits, bits) if self.weights.int8_activations and bits is not None else bits

    def _weight(
        self, group: list[Projection], form: Form, biases: tuple[int, ...] = (), bits: str | None = None
    ) -> fx.Node:
        """Add the placeholder of the group's weight in some form."""
        sources, packed = self._made.sources(p.weight for p in group), None
        if form.startswith("packed"):
            inputs, int8 = tensor_meta(group[0].x).one_token[-1], form == "packed int8"
            itemsize = 1 if int8 else tensor_meta(group[0].weight).dtype.itemsize
            outputs = sum(p.width for p in group)
            words = ALL_FORMS[bits].words(inputs) if bits else inputs * itemsize // packed_weights.WORD.itemsize
            packed = PackedSize(outputs, words, 2 if int8 else 1)
        wide = self._made.recipes[group[0].weight].wide
        return self._made.input(Recipe(sources, group[0].transposed, form, biases, packed, bits, wide=wide))

    def _merge_gated(self, gate: Gate) -> None:
        """Replace a gate by one GEMM, if there is one."""
        group, result = gate.projections, gate.nodes[0]
        x, about = _read_by(group[0]), tensor_meta(result)
        bits, *others = {self._quantised(p) for p in group}
        if others or bits == "int8":
            return
        update = update_size(group)
        gemm = packed_weights.gemm(tensor_meta(x), tensor_meta(group[0].weight), about, gate.op, bits, update)
        if gemm is None:
            return
        with self.graph.inserting_before(result):
            weight = self._weight(group, "packed gated", self._made.biases(group), bits)
            added = () if update is None else low_rank(self._made, group, x, update, "packed gated lora b")
            result.replace_all_uses_with(self._made.call(gemm, (x, weight, *added), about))
        for node in gate.nodes:
            self.graph.erase_node(node)

    def _merge(self, x: fx.Node, group: list[Projection], bits: str | None = None) -> None:
        """Replace projections of `x` by one of packed weights, in few bits if a GEMM takes them, if any takes them."""
        about, weight, update = _whole(group), tensor_meta(group[0].weight), update_size(group)
        gemm = packed_weights.gemm(tensor_meta(x), weight, about, bits=bits, update=update)
        if gemm is None and bits is not None:
            return self._merge(x, group)
        if gemm is None and not packed_by_onednn(weight):
            return
        biases = self._made.biases(group)
        with self.graph.inserting_before(group[0].node):
            if gemm is not None:
                added = () if update is None else low_rank(self._made, group, x, update, "packed lora b")
                whole = self._made.call(gemm, (x, self._weight(group, "packed", biases, bits), *added), about)
                self._replace(group, whole, lambda part, _: part)
            else:
                bias = self._made.input(Recipe(biases)) if biases else None
                whole = self._made.call(packed_linear, (x, self._weight(group, "onednn"), bias), about)
                self._replace(group, whole, lambda part, p: updated(self._made, part, p))

    def _merge_int8(self, x: fx.Node, group: list[Projection]) -> None:
        """Replace projections of `x` by one of int8 weights: rotate and round x, multiply, scale, add the biases.

        They stay wider where no int8 GEMM is exact.
        """
        about = _whole(group)
        one_scale = Meta.of(torch.float32, (*about.shape[:-1], 1))
        wide, as_int8 = (Meta.of(dtype, tensor_meta(x).shape) for dtype in (torch.float32, torch.int8))
        gemm = packed_weights.gemm(as_int8, tensor_meta(group[0].weight), about)
        if gemm is None and not quantize.exact_onednn():
            return self._merge(x, group)
        with self.graph.inserting_before(group[0].node):
            if quantize.RotationShape.of(tensor_meta(x).one_token[-1]):
                x = self._made.call(quantize.rotated, (x,), wide)
            scale = self._made.call(quantize.token_scale, (x,), one_scale)
            rounded = self._made.call(quantize.to_int8, (x, scale), as_int8)
            if gemm is not None:
                whole = self._made.call(gemm, (rounded, self._weight(group, "packed int8")), about)
            else:
                weight, scales = (self._weight(group, form) for form in _ONEDNN_INT8)
                whole = self._made.call(quantize.int8_linear, (rounded, weight, scales, about.dtype), about)

            def finished(part: fx.Node, p: Projection) -> fx.Node:
                own = tensor_meta(p.node)
                part = self._made.call(quantize.scaled, (part, scale), own)
                if p.bias is not None:
                    part = self._made.call(aten.add.Tensor, (part, p.bias), own)
                return updated(self._made, part, p)

            self._replace(group, whole, finished)

    def _replace(
        self, group: list[Projection], whole: fx.Node, finished: Callable[[fx.Node, Projection], fx.Node]
    ) -> None:
        """Let those that read the group's results read parts of `whole`.

        Args:
            group: Projections that become one.
            whole: Node of their results side by side.
            finished: Returns the node of a projection's result, given that of its part.
        """
        dim, at = len(tensor_meta(whole).shape) - 1, 0
        for p in group:
            part = whole
            if len(group) > 1:
                part = self._made.call(aten.slice.Tensor, (whole, dim, at, at + p.width), tensor_meta(p.node))
            at += p.width
            p.node.replace_all_uses_with(finished(part, p))
        for call in [call for p in group for call in p.calls]:
            self.graph.erase_node(call)


_ONEDNN_INT8: tuple[Form, Form] = ("onednn int8", "scales")


def _seen_as(node: fx.Node) -> fx.Node:
    """Return the only node that reads a result [T, columns], if it is a view of the same rows; else the node itself."""
    readers = list(node.users)
    if len(readers) != 1 or readers[0].target not in VIEWS:
        return node
    seen = tensor_meta(readers[0])
    rows = seen.token_dim is not None and seen.one_token[-1] == tensor_meta(node).one_token[-1]
    return readers[0] if rows and seen.numel_per_token == seen.one_token[-1] else node


def _read_by(p: Projection) -> fx.Node:
    """Return the node that a projection reads now: `p.x`, or what has replaced it."""
    return as_node(p.calls[-1].args[1 if p.transposed else 0])


def _whole(group: list[Projection]) -> Meta:
    """Return shape and dtype of the group's results side by side."""
    about = tensor_meta(group[0].node)
    return Meta.of(about.dtype, (*about.shape[:-1], sum(p.width for p in group)))
