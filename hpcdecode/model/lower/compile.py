"""From a slice's graph to what runs it, and to the weights in the form that it takes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from hpcdecode.model.frontend.cache import directory
from hpcdecode.model.frontend.checkpoint import Stack
from hpcdecode.model.frontend.meta import Meta, meta
from hpcdecode.model.lower.chain import chained
from hpcdecode.model.lower.fuse import fuse
from hpcdecode.model.lower.linears import Recipe, make_weight, merge_projections

aten = torch.ops.aten


@dataclass(frozen=True)
class Compiled:
    graph: fx.Graph
    run: Callable[..., tuple[Tensor, ...]]  # ([o,] context..., weights...)
    recipes: list[Recipe]

    def weights(self, sources: Sequence[Tensor | Stack]) -> tuple[Tensor | Stack, ...]:
        """The weights of one slice as `run` takes them, from the tensors that its graph named."""
        return tuple(make_weight(recipe, [sources[i] for i in recipe.inputs]) for recipe in self.recipes)


def compile_graph(graph: fx.Graph, device: torch.device, int8: bool = False, inductor: bool = False) -> Compiled:
    """Merge, pack and fuse for the CPU; a plain graph for other devices, or what torch's compiler makes of it.

    int8: of the projections' weights. inductor: whether that compiles."""
    if inductor:
        return compile_by_torch(graph)
    if device.type != "cpu":
        return compile_plain(graph)
    made = copied(graph)
    recipes = merge_projections(made, int8)
    join_rows(made)
    return runnable(chained(fuse(made)), recipes)


def compile_plain(graph: fx.Graph) -> Compiled:
    """The graph as it is, operator by operator, on any device."""
    weights = sum(n.op == "placeholder" and n.name.startswith("w") for n in graph.nodes)
    return runnable(copied(graph), [Recipe((i,)) for i in range(weights)])


def compile_by_torch(graph: fx.Graph) -> Compiled:
    """The plain graph with its element-wise work fused: at the first call, and at the second for any number of tokens.

    What was compiled is kept beside the traces.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory() / "inductor"))
    plain = compile_plain(graph)
    return replace(plain, run=torch.compile(plain.run, fullgraph=True))


def runnable(graph: fx.Graph, recipes: list[Recipe]) -> Compiled:
    return Compiled(graph, fx.GraphModule({}, graph).forward, recipes)


def copied(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def join_rows(graph: fx.Graph) -> None:
    """Let the q, k and v of a slice's results lie side by side in one matrix, as the R-part takes them."""
    results = list(graph.output_node().args[0])
    if len(results) < 3:
        return
    widths = [meta(n).shape[1] for n in results[:3]]
    with graph.inserting_before(graph.output_node()):
        rows = graph.call_function(aten.cat.default, (results[:3], 1))
        rows.meta["about"] = Meta.of(meta(results[0]).dtype, (meta(results[0]).shape[0], sum(widths)))
        for i, width in enumerate(widths):
            start = sum(widths[:i])
            results[i] = graph.call_function(aten.narrow.default, (rows, 1, start, width))
    graph.output_node().args = (tuple(results),)
