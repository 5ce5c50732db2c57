"""A slice's graph while its weights get other forms: new placeholders, and how each of them is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch.fx.node import Argument

from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower.projections import Projection
from hpcdecode.model.lower.recipe import Recipe


class WeightGraph:
    """A graph that is changed in place, and its weights.

    Args:
        graph: ([o,] context..., weights...) -> results.

    Attributes:
        graph: The graph.
        recipes: Recipes of its weights, by their placeholders.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.recipes = {node: Recipe((i,)) for i, node in enumerate(n for n in inputs if n.name.startswith("w"))}
        self._last_input = inputs[-1]

    def input(self, recipe: Recipe) -> fx.Node:
        """Add the placeholder of a weight."""
        with self.graph.inserting_after(self._last_input):
            node = self.graph.placeholder(f"p{len(self.recipes)}")
        self.recipes[node] = recipe
        return node

    def call(self, target: Callable[..., Any], args: tuple[Argument, ...], about: Meta) -> fx.Node:
        """Add a call where the graph inserts, with what is known of its result."""
        node = self.graph.call_function(target, args)
        node.meta["about"] = about
        return node

    def sources(self, weights: Iterable[fx.Node]) -> tuple[int, ...]:
        """Return the numbers of weights that the slice's graph named."""
        return tuple(self.recipes[n].sources[0] for n in weights)

    def biases(self, group: Iterable[Projection]) -> tuple[int, ...]:
        """Return the numbers of the biases of projections."""
        return self.sources(p.bias for p in group if p.bias is not None)

    def finish(self) -> list[Recipe]:
        """Remove weights that nothing reads, and return the recipes of the others in their order."""
        for node in list(self.recipes):
            if not node.users:
                self.graph.erase_node(node)
        return [self.recipes[n] for n in self.graph.nodes if n in self.recipes]
