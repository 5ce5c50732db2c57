"""From a slice's graph to what runs it, and to the weights in the form that it takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hpcdecode.model.checkpoint import Stack
from hpcdecode.model.fuse import fuse
from hpcdecode.model.linears import Recipe, make_weight, merge_projections


@dataclass(frozen=True)
class Compiled:
    run: Callable[..., tuple[Tensor, ...]]  # ([o,] context..., weights...)
    recipes: list[Recipe]

    def weights(self, sources: Sequence[Tensor | Stack]) -> tuple[Tensor | Stack, ...]:
        """The weights of one slice as `run` takes them, from the tensors that its graph named."""
        return tuple(make_weight(recipe, [sources[i] for i in recipe.sources]) for recipe in self.recipes)


def compile_graph(graph: fx.Graph, device: torch.device) -> Compiled:
    """Merge, pack and fuse for the CPU; a plain graph for other devices."""
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    if device.type != "cpu":
        weights = sum(n.op == "placeholder" and n.name.startswith("w") for n in graph.nodes)
        return Compiled(fx.GraphModule({}, made).forward, [Recipe((i,)) for i in range(weights)])
    recipes = merge_projections(made)
    return Compiled(fx.GraphModule({}, fuse(made)).forward, recipes)
