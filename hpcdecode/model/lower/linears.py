"""Projections of one input merged into one, and their weights packed at load, as they are or as int8: in panels for
products of our own where the CPU has them, else for oneDNN."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from hpcdecode._ops_cpu import Op
from hpcdecode.model.frontend.meta import Meta, meta
from hpcdecode.model.frontend.rows import packed_linear
from hpcdecode.model.lower import packed_weights as panels
from hpcdecode.model.lower import quantize

aten = torch.ops.aten
PACKED_FOR = 512  # tokens: the packed layout is chosen for this many, and serves any number
Form = Literal["plain", "packed", "panels", "gated panels", "int8", "int8 panels", "scales"]


@dataclass(frozen=True)
class Recipe:
    """How a slice's weight is made of the trace's: `sources` stacked along their first dimension, and `biases`."""

    sources: tuple[int, ...]
    transposed: bool = False  # sources are [in, out]
    form: Form = "plain"
    biases: tuple[int, ...] = ()  # that panels begin with

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.sources + self.biases


@dataclass
class Projection:
    """x @ weight.T + bias; weight and bias are placeholders of the graph."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool

    @property
    def width(self) -> int:
        return meta(self.node).shape[-1]


@dataclass
class Gate:
    """op(gate) * up, all that is made of two projections of one input, or of one whose first half is the gate."""

    op: Op
    projections: list[Projection]
    nodes: list[fx.Node]  # the result, and what it is made of, each before its own arguments


class Merging:
    """Projections of `graph`, in place, by packed weights; int8: by quantised ones where outputs are many."""

    def __init__(self, graph: fx.Graph, int8: bool):
        self.graph, self.int8 = graph, int8
        weights = [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("w")]
        self.recipes = {node: Recipe((i,)) for i, node in enumerate(weights)}
        self.last = [n for n in graph.nodes if n.op == "placeholder"][-1]

    def run(self) -> list[Recipe]:
        """The recipes of the weights that the graph takes now, in their order."""
        if not self.int8:
            projections = {p.node: p for p in self._projections()}
            for node in self.graph.nodes:
                if (gate := gate_of(node, projections)) is not None:
                    self._gated(gate)
        siblings: dict[tuple, list[Projection]] = defaultdict(list)
        for p in self._projections():
            int8 = self.int8 and p.width * quantize.NARROW >= meta(p.x).shape[-1]
            siblings[p.x, p.bias is None, p.transposed, int8].append(p)
        for (x, _, _, int8), group in siblings.items():
            (self._quantized if int8 else self._packed)(x, group)
        for node in list(self.recipes):
            if not node.users:
                self.graph.erase_node(node)
        return [self.recipes[n] for n in self.graph.nodes if n in self.recipes]

    def _projections(self) -> Iterator[Projection]:
        return (p for node in self.graph.nodes if (p := projection(node, self.recipes)) is not None)

    def _weight(self, group: list[Projection], form: Form, biases: tuple[int, ...] = ()) -> fx.Node:
        sources = self._sources(p.weight for p in group)
        return self._input(Recipe(sources, group[0].transposed, form, biases))

    def _sources(self, weights: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(self.recipes[n].sources[0] for n in weights)

    def _biases(self, group: list[Projection]) -> tuple[int, ...]:
        return () if group[0].bias is None else self._sources(p.bias for p in group)

    def _input(self, recipe: Recipe) -> fx.Node:
        with self.graph.inserting_after(self.last):
            node = self.graph.placeholder(f"p{len(self.recipes)}")
        self.recipes[node] = recipe
        return node

    def _gated(self, gate: Gate) -> None:
        """One product, where it is offered."""
        group, result = gate.projections, gate.nodes[0]
        x, about = group[0].x, meta(result)
        if (own := panels.product(meta(x), meta(group[0].weight), about, gate.op)) is None:
            return
        with self.graph.inserting_before(result):
            weight = self._weight(group, "gated panels", self._biases(group))
            result.replace_all_uses_with(self._call(own, (x, weight), about))
        for node in gate.nodes:
            self.graph.erase_node(node)

    def _packed(self, x: fx.Node, group: list[Projection]) -> None:
        about = _whole(group)
        biases = self._biases(group)
        with self.graph.inserting_before(group[0].node):
            if (own := panels.product(meta(x), meta(group[0].weight), about)) is not None:
                whole = self._call(own, (x, self._weight(group, "panels", biases)), about)
            else:
                bias = self._input(Recipe(biases)) if biases else None
                whole = self._call(packed_linear, (x, self._weight(group, "packed"), bias), about)
            self._replace(group, whole, lambda part, _: part)

    def _quantized(self, x: fx.Node, group: list[Projection]) -> None:
        about, of_x = _whole(group), meta(x)
        one_scale = Meta.of(torch.float32, (*about.shape[:-1], 1))
        as_int8 = Meta.of(torch.int8, of_x.shape)
        with self.graph.inserting_before(group[0].node):
            scale = self._call(quantize.token_scale, (x,), one_scale)
            rounded = self._call(quantize.to_int8, (x, scale), as_int8)
            if (own := panels.product(as_int8, meta(group[0].weight), about)) is not None:
                whole = self._call(own, (rounded, self._weight(group, "int8 panels")), about)
            else:
                weight, scales = (self._weight(group, form) for form in ("int8", "scales"))
                whole = self._call(quantize.int8_linear, (rounded, weight, scales, about.dtype), about)

            def finished(part: fx.Node, p: Projection) -> fx.Node:
                part = self._call(quantize.scaled, (part, scale), meta(p.node))
                return part if p.bias is None else self._call(aten.add.Tensor, (part, p.bias), meta(p.node))

            self._replace(group, whole, finished)

    def _replace(self, group: list[Projection], whole: fx.Node, finished: Callable) -> None:
        """Let those that read the group's results read parts of `whole`."""
        dim, at = len(meta(whole).shape) - 1, 0
        for p in group:
            about, part = meta(p.node), whole
            if len(group) > 1:
                part = self._call(aten.slice.Tensor, (whole, dim, at, at + p.width), about)
            at += p.width
            p.node.replace_all_uses_with(finished(part, p))
        for p in group:
            self.graph.erase_node(p.node)

    def _call(self, target: Callable, args: tuple, about: Meta) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["about"] = about
        return node


def merge_projections(graph: fx.Graph, int8: bool) -> list[Recipe]:
    """Merge and pack the projections of `graph` in place; returns the recipes of its weights, in their order."""
    return Merging(graph, int8).run()


def _whole(group: list[Projection]) -> Meta:
    about = meta(group[0].node)
    return Meta.of(about.dtype, (*about.shape[:-1], sum(p.width for p in group)))


def projection(node: fx.Node, weights: dict[fx.Node, Recipe]) -> Projection | None:
    if node.target is aten.linear.default:
        x, weight, bias = (*node.args, None)[:3]
        found = Projection(node, x, weight, bias, transposed=False)
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
        found = Projection(node, x, weight, bias, transposed=True)
    else:
        return None
    known = all(n in weights for n in (found.weight, found.bias) if n is not None)
    alone = len(found.weight.users) == 1
    return found if known and alone and packable(meta(found.weight)) else None


def gate_of(node: fx.Node, projections: dict[fx.Node, Projection]) -> Gate | None:
    if node.target is not aten.mul.Tensor or node.kwargs:
        return None
    for activated, up in (node.args, node.args[::-1]):
        if not isinstance(activated, fx.Node) or (op := _function(activated)) is None:
            continue
        parts = [activated.args[0], up]
        halved = _halved(*parts)
        made = [projections.get(n) for n in (parts if halved is None else halved.args[:1])]
        if None in made or len({(p.x, p.width, p.transposed, p.bias is None) for p in made}) > 1:
            continue
        inner = [activated, *parts, *([] if halved is None else [halved, made[0].node])]
        if all(len(n.users) == (2 if n is halved else 1) for n in inner):
            return Gate(op, made, [node, *inner])
    return None


def _halved(one: object, other: object) -> fx.Node | None:
    """The node whose first half is `one` and whose second is `other`."""
    if not all(isinstance(n, fx.Node) and n.target is operator.getitem for n in (one, other)):
        return None
    (split, first), (same, second) = one.args, other.args
    if split is not same or (first, second) != (0, 1) or split.target is not aten.split.Tensor or split.kwargs:
        return None
    x, size, dim = (*split.args, 0)[:3]
    shape = meta(x).shape
    return split if dim in (-1, len(shape) - 1) and 2 * size == shape[-1] else None


def _function(node: fx.Node) -> Op | None:
    if node.target is aten.gelu.default and node.kwargs.get("approximate") == "tanh":
        return Op.gelu_tanh
    return Op.silu if node.target is aten.silu.default else None


def packable(weight: Meta) -> bool:
    """Whether oneDNN packs such weights on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def make_weight(recipe: Recipe, tensors: list[Tensor]) -> Tensor:
    """The weight of `recipe` from the tensors that its sources and biases name."""
    count, form = len(recipe.sources), recipe.form
    parts = [w.t() for w in tensors[:count]] if recipe.transposed else tensors[:count]
    if form == "panels":
        return panels.plain(parts, _joined(tensors[count:]) if recipe.biases else None)
    if form == "gated panels":
        return panels.gated(*_two(parts), _two(tensors[count:]))
    whole = _joined(parts)
    if form == "packed":
        return torch.ops.mkldnn._reorder_linear_weight(whole.contiguous(), PACKED_FOR)
    if form == "int8":
        return quantize.pack(whole, PACKED_FOR)
    if form == "int8 panels":
        return panels.int8(quantize.quantized(whole), quantize.output_scales(whole))
    return quantize.output_scales(whole) if form == "scales" else whole


def _two(tensors: list[Tensor]) -> list[Tensor]:
    """Of one tensor its halves; two, or none, as they are."""
    return [part for t in tensors for part in t.chunk(2 // len(tensors))]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
