"""Put the sums over the members of a group as late as possible, so that results that are added share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.node import Target

from hpcdecode.model.frontend.meta import meta, tensor_meta
from hpcdecode.model.frontend.operators import MEMBER_SUM, MOVES, SPLITS, UNCHANGED

aten = torch.ops.aten
# Linear in their first argument.
LINEAR: frozenset[Target] = (
    (MOVES - SPLITS)
    | UNCHANGED
    | {
        aten.expand.default,
        aten.index.Tensor,
        aten.neg.default,
        aten.sum.dim_IntList,
    }
)
SCALINGS: frozenset[Target] = frozenset({aten.mul.Tensor, aten.div.Tensor})


class Partial(NamedTuple):
    """A value that members have parts of: base + the sum of `part` over members.

    Attributes:
        base: Node of what every member has whole, or None.
        part: Node of what members add up.
    """

    base: fx.Node | None
    part: fx.Node


class PartialSums:
    """Values of a graph that have not been summed up over members yet.

    Args:
        graph: The graph that is written.
    """

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self._of: dict[fx.Node, Partial] = {}

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._of

    def note(self, node: fx.Node, part: fx.Node) -> None:
        """Note that `node` is the sum of `part` over members."""
        self._of[node] = Partial(None, part)

    def added_up(self, node: fx.Node) -> fx.Node:
        """Add the sum over members, and return the node of the value of `node`."""
        base, part = self._of.pop(node)
        total = self._call(MEMBER_SUM, (part,), part)
        return total if base is None else self._call(aten.add.Tensor, (base, total), node)

    def carry(self, node: fx.Node, value: Callable[[fx.Node], fx.Node]) -> bool:
        """Write the call `node` over values that are not summed up, if it may stand before the sum.

        Args:
            node: A call whose result every member has.
            value: Returns the node of a value that is summed up.

        Returns:
            False if it must stand after the sum, or has nothing to do with any.
        """
        inputs = [n for n in node.all_input_nodes if n in self._of]
        about = meta(node)
        if not inputs or about is None or not about.dtype.is_floating_point:
            return False
        made = None
        if node.target in LINEAR and inputs == [node.args[0]]:
            made = self._applied(node, inputs[0], value)
        elif node.target in SCALINGS and len(inputs) == 1 and not node.kwargs:
            made = self._scaled(node, inputs[0], value)
        elif node.target is aten.add.Tensor and not node.kwargs:
            made = self._added(node, value)
        if made is not None:
            self._of[node] = made
        return made is not None

    def _applied(self, node: fx.Node, x: fx.Node, value: Callable[[fx.Node], fx.Node]) -> Partial:
        """Write a call that is linear in its first argument, over both parts of `x`."""
        base, part = self._of[x]
        made = self._graph.node_copy(node, lambda n: part if n is x else value(n))
        return Partial(base and self._graph.node_copy(node, lambda n: base if n is x else value(n)), made)

    def _scaled(self, node: fx.Node, x: fx.Node, value: Callable[[fx.Node], fx.Node]) -> Partial | None:
        """Write a product of `x` and something whole, or `x` divided by that; None if `x` has a base."""
        base, part = self._of[x]
        if base is not None or node.args.count(x) != 1 or (node.target is aten.div.Tensor and node.args[0] is not x):
            return None
        return Partial(None, self._graph.node_copy(node, lambda n: part if n is x else value(n)))

    def _added(self, node: fx.Node, value: Callable[[fx.Node], fx.Node]) -> Partial | None:
        """Write a sum of two values, one or both of which are not summed up; None if one is broadcast."""
        shape = tensor_meta(node).shape
        operands = [n for n in node.args if isinstance(n, fx.Node) and (about := meta(n)) and about.shape == shape]
        if len(operands) != 2:
            return None
        split = [self._of[n] if n in self._of else Partial(value(n), None) for n in operands]  # type: ignore[arg-type]
        base, part = (self._total([x for x in side if x is not None], node) for side in zip(*split, strict=True))
        return None if part is None else Partial(base, part)

    def _total(self, terms: list[fx.Node], like: fx.Node) -> fx.Node | None:
        if len(terms) < 2:
            return terms[0] if terms else None
        return self._call(aten.add.Tensor, tuple(terms), like)

    def _call(self, target: Target, args: tuple[fx.Node, ...], like: fx.Node) -> fx.Node:
        made = self._graph.create_node("call_function", target, args)
        made.meta = dict(like.meta)
        return made
