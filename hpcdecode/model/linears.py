"""Projections of one input merged into one, and their weights packed for the GEMM library (oneDNN) at load."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hpcdecode.model.meta import Meta, meta
from hpcdecode.model.rows import packed_linear

aten = torch.ops.aten
PACKED_FOR = 512  # tokens: the packed layout is chosen for this many, and serves any number


@dataclass(frozen=True)
class Recipe:
    """How a slice's weight is made of the trace's: `sources` stacked along their first dimension."""

    sources: tuple[int, ...]
    transposed: bool = False  # sources are [in, out]
    packed: bool = False


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


def merge_projections(graph: fx.Graph) -> list[Recipe]:
    """Merge and pack the projections of `graph` in place; returns the recipes of its weights, in their order."""
    weights = [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("w")]
    recipes = {node: Recipe((i,)) for i, node in enumerate(weights)}
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    siblings: dict[tuple, list[Projection]] = defaultdict(list)
    for node in graph.nodes:
        if (found := projection(node, recipes)) is not None:
            siblings[found.x, found.bias is None, found.transposed].append(found)
    for (x, _, transposed), group in siblings.items():
        with graph.inserting_after(last):
            weight = graph.placeholder(f"p{len(recipes)}")
            recipes[weight] = Recipe(tuple(recipes[p.weight].sources[0] for p in group), transposed, packed=True)
        bias = None
        if group[0].bias is not None:
            with graph.inserting_after(weight):
                bias = graph.placeholder(f"p{len(recipes)}")
                recipes[bias] = Recipe(tuple(recipes[p.bias].sources[0] for p in group))
        with graph.inserting_before(group[0].node):
            replace_projections(graph, group, x, weight, bias)
    for node in weights:
        if not node.users:
            graph.erase_node(node)
    return [recipes[n] for n in graph.nodes if n in recipes]


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


def packable(weight: Meta) -> bool:
    """Whether oneDNN packs such weights on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def replace_projections(graph: fx.Graph, group: list[Projection], x: fx.Node, weight: fx.Node, bias) -> None:
    whole = graph.call_function(packed_linear, (x, weight, bias))
    about = meta(group[0].node)
    whole.meta["about"] = Meta.of(about.dtype, (*about.shape[:-1], sum(p.width for p in group)))
    at = 0
    for p in group:
        part = whole
        if len(group) > 1:
            part = graph.call_function(aten.slice.Tensor, (whole, len(about.shape) - 1, at, at + p.width))
            part.meta["about"] = meta(p.node)
        at += p.width
        p.node.replace_all_uses_with(part)
        graph.erase_node(p.node)


def make_weight(recipe: Recipe, sources: list[Tensor]) -> Tensor:
    """The weight of `recipe` from the tensors that its sources name."""
    parts = [w.t() for w in sources] if recipe.transposed else sources
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if not recipe.packed:
        return whole
    return torch.ops.mkldnn._reorder_linear_weight(whole.contiguous(), PACKED_FOR)
