"""Let a slice's graph multiply by experts, and by adapters (LoRA), in grouped GEMMs over sorted rows.

Rows are sorted once a layer. What works on each row by itself, such as an activation and its gate, takes sorted rows,
and the next projection by the same experts does too. Everything else gets them in the order of tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.node import Argument

from hpcdecode.model.frontend.adapters import expert_lora_update, lora_update
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.meta import Meta, meta, size_of, tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.whole_experts import by_rows, experts_of, first_expert
from hpcdecode.model.lower.expanded import expandable, expanded_weight
from hpcdecode.model.lower.grouped_products import ADAPTER_EXPERTS, EXPERT_ORDER, EXPERT_PRODUCT, ROWS_BY_TOKEN
from hpcdecode.model.lower.projections import Projection, expert_projection
from hpcdecode.model.lower.weight_graph import WeightGraph

aten = torch.ops.aten


class ChosenFrom(NamedTuple):
    """What rows are sorted by: the experts that tokens chose, and those of them that have weights here.

    Attributes:
        expert: Node of the choice, integers [T, K].
        experts: Number of experts that have weights here.
        first: Number of the first of them.
        whole: Whether all have.
    """

    expert: fx.Node
    experts: int
    first: int
    whole: bool


class RowOrder(NamedTuple):
    """Nodes of the results of `expert_order`."""

    chosen: fx.Node
    order: fx.Node
    ends: fx.Node


def group_experts(made: WeightGraph, quantised: Callable[[Projection], str | None] = lambda _: None) -> None:
    """Replace projections by experts and updates by adapters in a graph, in place.

    Args:
        made: The graph.
        quantised: Returns what the weights of a projection are in few bits, one of ALL_FORMS, or None.
    """
    ExpertGrouper(made, quantised).run()


class ExpertGrouper:
    """Goes through a graph in its order, and notes which of its values are sorted.

    Args:
        made: The graph.
        quantised: Returns what the weights of a projection are in few bits, one of ALL_FORMS, or None.
    """

    def __init__(self, made: WeightGraph, quantised: Callable[[Projection], str | None]):
        self._made, self._quantised = made, quantised
        self._orders: dict[ChosenFrom, RowOrder] = {}
        self._sorted: dict[fx.Node, ChosenFrom] = {}
        self._by_token: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[fx.Node, fx.Node] = {}
        self._places: dict[tuple[Argument, ...], fx.Node] = {}

    def run(self) -> None:
        """Change the graph in place."""
        for node in list(self._made.graph.nodes):
            with self._made.graph.inserting_before(node):
                if node.target is expert_linear:
                    self._group(node)
                elif node.target is lora_update:
                    self._update(node)
                elif node.target is expert_lora_update:
                    self._update_experts(node)
                elif (by := self._stays_sorted(node)) is not None:
                    self._sorted[node] = by
                else:
                    self._restore(node)

    def _group(self, node: fx.Node) -> None:
        """Replace a projection by experts."""
        x, expert, weight, bias, transposed, *first = node.args
        by = ChosenFrom(as_node(expert), experts_of(node), first_expert(node), not first)
        is_sorted = self._sorted.get(as_node(x)) == by
        if not is_sorted:
            self._restore(node)
        about = tensor_meta(node)
        if (expanded := self._expanded(node)) is not None:
            weight, transposed = expanded, False
        elif weight in self._made.recipes:
            self._made.recipes[weight] = replace(self._made.recipes[weight], form="experts")
        product = self._product(node.args[0], by, (weight, bias, transposed, is_sorted), about)
        node.replace_all_uses_with(product)
        self._made.graph.erase_node(node)

    def _expanded(self, node: fx.Node) -> fx.Node | None:
        """Return the node of expanded weights in few bits of a projection by experts, or None if they are in none."""
        p = expert_projection(node, self._made.recipes)
        bits = None if p is None else expandable(p, self._quantised(p))
        return None if p is None or bits is None else expanded_weight(self._made, [p], bits)

    def _product(self, x: Argument, by: ChosenFrom, weights: tuple[Argument, ...], about: Meta) -> fx.Node:
        product = self._made.call(EXPERT_PRODUCT, (x, *self._order(by), *weights), about)
        self._sorted[product] = by
        return product

    def _order(self, by: ChosenFrom) -> RowOrder:
        """Return the order of rows, computed once."""
        if by not in self._orders:
            shape = tensor_meta(by.expert).shape
            made = self._made.graph.call_function(EXPERT_ORDER, (by.expert, by.experts, by.first))
            about = (Meta.of(torch.int16, shape), Meta.of(torch.int64, shape), Meta.of(torch.int32, (by.experts,)))
            parts = (self._made.call(operator.getitem, (made, i), each) for i, each in enumerate(about))
            self._orders[by] = RowOrder(*parts)
        return self._orders[by]

    def _update(self, node: fx.Node) -> None:
        """Replace what adapters add to a projection: tokens without an adapter get zeros."""
        self._restore(node)
        y, x, adapters, a, b = map(as_node, node.args)
        about, dtype = tensor_meta(node), tensor_meta(node).dtype
        count, _, inputs = tensor_meta(a).one_token
        if adapters not in self._numbers:
            one = Meta.of(tensor_meta(adapters).dtype, (*tensor_meta(adapters).shape, 1))
            self._numbers[adapters] = self._made.call(aten.unsqueeze.default, (adapters, 1), one)
        by = ChosenFrom(self._numbers[adapters], count, 0, whole=False)
        tokens = tensor_meta(adapters).shape[0]
        rows = self._made.call(aten.reshape.default, (x, [-1, 1, inputs]), Meta.of(dtype, (tokens, 1, inputs)))
        full = self._low_rank(rows, by, (a, b), Meta.of(dtype, (tokens, 1, about.one_token[-1])))
        shape = [size if isinstance(size, int) else -1 for size in about.shape]
        added = self._made.call(aten.reshape.default, (full, shape), about)
        node.replace_all_uses_with(self._made.call(aten.add.Tensor, (y, added), about))
        self._made.graph.erase_node(node)

    def _update_experts(self, node: fx.Node) -> None:
        """Replace what adapters add to a projection by experts: rows without an adapter get zeros."""
        self._restore(node)
        y, x, adapters, expert, a, b = map(as_node, node.args[:6])
        key = adapters, expert, *node.args[6:]
        if key not in self._places:
            numbers = Meta.of(torch.int64, tensor_meta(expert).shape)
            self._places[key] = self._made.call(ADAPTER_EXPERTS, key, numbers)
        by = ChosenFrom(self._places[key], tensor_meta(a).one_token[0], 0, whole=False)
        added = self._low_rank(x, by, (a, b), tensor_meta(node))
        node.replace_all_uses_with(self._made.call(aten.add.Tensor, (y, added), tensor_meta(node)))
        self._made.graph.erase_node(node)

    def _low_rank(self, x: fx.Node, by: ChosenFrom, factors: tuple[fx.Node, fx.Node], about: Meta) -> fx.Node:
        """Return B (A x) in the order of tokens; about: of the result."""
        a, b = factors
        low = Meta.of(about.dtype, (*about.shape[:-1], tensor_meta(a).one_token[1]))
        made = self._product(x, by, (a, None, False, False), low)
        return self._in_token_order(self._product(made, by, (b, None, False, True), about))

    def _stays_sorted(self, node: fx.Node) -> ChosenFrom | None:
        """Return what the result of a call is sorted by if it takes sorted rows, each by itself; else None."""
        of = {self._sorted[n] for n in node.all_input_nodes if n in self._sorted}
        if len(of) != 1:
            return None
        (by,) = of
        rows = tensor_meta(by.expert).shape
        others = [n for n in node.all_input_nodes if n not in self._sorted]
        about = meta(node)
        rank = 0 if about is None else len(about.shape)
        return by if by_rows(node, rows) and all(is_same_for_all_rows(n, rank) for n in others) else None

    def _restore(self, node: fx.Node) -> None:
        """Let a call read all that is sorted in the order of tokens."""
        for value in node.all_input_nodes:
            if value in self._sorted:
                node.replace_input_with(value, self._in_token_order(value))

    def _in_token_order(self, value: fx.Node) -> fx.Node:
        if value not in self._by_token:
            by = self._sorted[value]
            _, order, ends = self._order(by)
            args = (value, order, ends, by.whole)
            self._by_token[value] = self._made.call(ROWS_BY_TOKEN, args, tensor_meta(value))
        return self._by_token[value]


def is_same_for_all_rows(operand: fx.Node, rank: int) -> bool:
    """Return whether an operand gives the same to all rows [T, K] of a result of that rank."""
    about = meta(operand)
    if about is None:
        return size_of(operand) is not None
    return about.static and all(size == 1 for size in about.shape[: max(0, len(about.shape) - rank + 2)])
