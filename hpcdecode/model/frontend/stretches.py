"""A slice's graph in stretches: each ends where the members of a group add up what they have, the last with the slice.

A slice of a whole model is one stretch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from hpcdecode.model.frontend.meta import size_of
from hpcdecode.model.frontend.nodes import as_int, results


@dataclass(frozen=True)
class Stretch:
    """Part of a slice between two sums.

    The values of a slice are its inputs, then what its stretches return, in order. The first that a stretch returns,
    unless it is the last, is this member's share of a sum, and the sum takes its place. If the share is of experts, the
    router's choice follows it, which is no value of the slice.

    Attributes:
        graph: (values..., weights...) -> values.
        takes: Numbers of the values that it takes.
        weights: Numbers of the slice's weights that it takes.
        experts: Number of experts of the layer that the share is of, dealt out whole; 0 if it is of none.
        own_rows: Whether the share's rows are zeros for tokens that no expert of this member was chosen for.
    """

    graph: fx.Graph
    takes: tuple[int, ...]
    weights: tuple[int, ...]
    experts: int = 0
    own_rows: bool = False


def stretches_of(graph: fx.Graph) -> list[Stretch]:
    """Return the stretches of a slice's graph, ([o,] context..., weights...) -> its results."""
    target = getattr(torch.ops.hpcdecode, "member_sum", None)  # defined once a model is traced or sharded
    sums = [n for n in graph.nodes if target is not None and n.target is target.default]
    cutter = _Cutter(graph, sums)
    if not sums:
        return [Stretch(graph, tuple(range(len(cutter.values))), tuple(range(len(cutter.weights))))]
    return list(cutter.stretches())


class _Cutter:
    """Cuts a slice's graph after each of its sums.

    A node is computed in the first stretch that can. Sizes are read where they are used.
    """

    def __init__(self, graph: fx.Graph, sums: Sequence[fx.Node]):
        self.graph, self.sums = graph, sums
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.values = [n for n in inputs if not n.name.startswith("w")]
        self.weights = {node: number for number, node in enumerate(n for n in inputs if n.name.startswith("w"))}
        self.level: dict[fx.Node, int] = {}
        for node in graph.nodes:
            after = sums.index(node) + 1 if node in sums else 0
            self.level[node] = max([after, *(self.level[n] for n in node.all_input_nodes)])

    def stretches(self) -> Iterator[Stretch]:
        """Yield the stretches in order."""
        count = len(self.sums) + 1
        known = {node: number for number, node in enumerate(self.values)}
        given = [self._given(number) for number in range(count)]
        for number in range(count):
            later = {n for nodes in given[number + 1 :] for n in nodes}
            if number < count - 1:
                made = [n for n in self._own(number) if n in later]
                ends = [*self.sums[number].all_input_nodes, *made]  # the share, and the router's choice
                after = [self.sums[number], *made]
            else:
                ends, after = results(self.graph), []
            stretch = self._stretch(number, given[number], ends, known)
            yield stretch if number == count - 1 else replace(stretch, **_of_experts(self.sums[number]))
            known.update({node: len(known) + i for i, node in enumerate(after)})

    def _own(self, number: int) -> list[fx.Node]:
        """Return the nodes that a stretch computes."""
        outside = {*self.values, *self.weights, *self.sums, self.graph.output_node()}
        return [n for n, at in self.level.items() if at == number and n not in outside and size_of(n) is None]

    def _given(self, number: int) -> list[fx.Node]:
        """Return the values and weights that a stretch needs and does not compute."""
        own = self._own(number)
        ends = results(self.graph) if number == len(self.sums) else self.sums[number].all_input_nodes
        needed = dict.fromkeys([*(n for node in own for n in self._sources(node)), *ends])
        return [n for n in self.level if n in needed and n not in own]

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield what a node reads, and in place of a size what that is the size of."""
        for source in node.all_input_nodes:
            if size_of(source) is None:
                yield source
            else:
                yield from self._sources(source)

    def _stretch(
        self, number: int, given: Sequence[fx.Node], ends: Sequence[fx.Node], known: dict[fx.Node, int]
    ) -> Stretch:
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        taken = [n for n in given if n not in self.weights]
        weights = [n for n in given if n in self.weights]
        for prefix, nodes in (("x", taken), ("w", weights)):
            for i, node in enumerate(nodes):
                new[node] = graph.placeholder(f"{prefix}{i}")
                new[node].meta = dict(node.meta)

        def value(node: fx.Node) -> fx.Node:
            return new[node] if node in new else copy(node)

        def copy(node: fx.Node) -> fx.Node:
            kwargs: dict[str, Argument] = {k: fx.map_arg(v, value) for k, v in node.kwargs.items()}
            assert callable(node.target), "expected a call"
            new[node] = graph.call_function(node.target, fx.map_arg(node.args, value), kwargs)
            new[node].meta = dict(node.meta)
            return new[node]

        for node in self._own(number):
            copy(node)
        graph.output(tuple(new[n] for n in ends))
        return Stretch(graph, tuple(known[n] for n in taken), tuple(self.weights[n] for n in weights))


def _of_experts(node: fx.Node) -> dict[str, Any]:
    """Return the fields of a stretch that say what experts the share of a sum is of."""
    experts, own_rows = node.args[2:4] or (0, False)
    return {"experts": as_int(experts), "own_rows": bool(own_rows)}
