"""Label the columns of a trace's tensors: labels that must be on one member of a group are joined.

The graph runs on labels instead of numbers, for one token. Moves move labels; what works element by element, reduces
or attends joins them. A projection joins nothing: its outputs have new labels, and what it reads is summed up over
members. Whatever is not known is replicated: every member computes all of it.

A value that every member has whole is None. It goes with any labels, since a member can take its own columns of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from hpcdecode.model.frontend.clean import VIEWS
from hpcdecode.model.frontend.meta import size_of, tensor_meta
from hpcdecode.model.frontend.mixers import feeds_mixer, recur_arguments
from hpcdecode.model.frontend.nodes import as_node, as_nodes
from hpcdecode.model.frontend.operators import (
    ATTEND,
    EXPERT_LINEAR,
    JOINS,
    MOVES,
    NEW,
    PROJECTIONS,
    REDUCTIONS,
    SUMMABLE,
    UNCHANGED,
    Linear,
    is_pointwise,
    reduced_dims,
)
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.recurrent import RECURRENT
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.units import REPLICATED, Ints, Units

aten = torch.ops.aten
Labels = Tensor | None  # None: whole on every member
Labelled = Labels | Sequence[Tensor]


class Labelling:
    """The labels of the tensors of a trace.

    Args:
        trace: The trace.
        members: Number of members of the group.
        experts: Projections whose experts are dealt out whole: their columns are not.

    Attributes:
        units: The units that labels make up.
        of: Labels by node. Nodes that are whole on every member are left out.
        static: Nodes that depend on no input of a step.
        projections: Projections by static weights, with the labels of their inputs and outputs, in the graph's order.
        heads: Labels of what is dealt out evenly, by attention or recurrence: KV heads, or heads of a state. Those that
            stay whole are left out.
        statistics: Dimensions of reductions of which every member has a part: those of norms over all heads.
    """

    def __init__(self, trace: Trace, members: int, experts: Collection[fx.Node] = ()):
        self.units = Units()
        self.of: dict[fx.Node, Tensor] = {}
        self.static: set[fx.Node] = {*trace.weights, *trace.constants}
        self.projections: list[tuple[Linear, Labels, Labels]] = []
        self.heads: dict[fx.Node, Tensor] = {}
        self.statistics: dict[fx.Node, list[int]] = {}
        self._members, self._experts = members, experts
        self._parts: dict[fx.Node, Sequence[Tensor]] = {}  # of nodes that return several tensors
        self._sizes: dict[fx.Node, int] = {}
        for node in trace.graph.nodes:
            if node.op == "call_function":
                self._run(node)
        self.units.settle()

    def dealt(self, labels: Tensor) -> bool:
        """Return whether every column of `labels` can be dealt out, and there are enough units for all members."""
        self.units.settle()
        units = self.units.of(labels)
        return bool((units != REPLICATED).all()) and not fewer(units, self._members)

    def _run(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        for n in inputs:
            if n in self.of and self.units.whole(self.of[n]):
                del self.of[n]
        if size_of(node) is not None:
            self._sizes[node] = 1 if node.target is aten.sym_size.int else self._size(node)
            return
        if all(n in self.static or n in self._sizes for n in inputs):
            self.static.add(node)
        elif node.target in PROJECTIONS and self.static.issuperset((linear := Linear.of(node)).weights):
            self._note(node, self._project(linear))
        elif any(n in self.of or n in self._parts for n in inputs):
            self._note(node, self._labels(node))

    def _note(self, node: fx.Node, labels: Labelled) -> None:
        if isinstance(labels, Tensor):
            self.of[node] = labels
        elif labels is not None:
            self._parts[node] = labels

    def _size(self, node: fx.Node) -> int:
        if not callable(node.target):
            raise TypeError(f"expected a call, got {node.name}")
        return int(node.target(*self._arguments(node)))

    def _arguments(self, node: fx.Node) -> Any:
        """Return the arguments of a node for one token, labels in the place of tensors."""
        return fx.map_arg(node.args, lambda n: self._sizes[n] if n in self._sizes else self.of.get(n))

    def _labels(self, node: fx.Node) -> Labelled:
        """Return the labels of a call that reads some."""
        target = node.target
        if target is operator.getitem:
            parts, i = self._parts.get(as_node(node.args[0])), node.args[1]
            return parts[i] if parts is not None and isinstance(i, int) else None
        if target in NEW:
            return None
        if target is ATTEND:
            return self._attend(node)
        if target in RECURRENT:
            return self._recur(node)
        if target in JOINS and callable(target):
            return self._join(node, target)
        if target in UNCHANGED:
            return self.of.get(as_node(node.args[0]))
        if node.args and isinstance(node.args[0], fx.Node) and node.args[0] in self.of:
            if target in SUMMABLE and self._is_statistic(node, self.of[node.args[0]]):
                return None
            known = self._of_first(node, self.of[node.args[0]])
            if known is not None:
                return known
        if is_pointwise(node):
            return self._pointwise(node)
        self._replicate_inputs(node)
        return None

    def _of_first(self, node: fx.Node, x: Tensor) -> Labelled:
        """Return the labels of a call that moves, reduces or normalises `x`, its first argument, or None."""
        target = node.target
        if target in MOVES and callable(target):
            call: Callable[..., Labelled] = aten.reshape.default if target in VIEWS else target
            return call(*self._arguments(node))
        if target is aten.expand.default:
            shape = tensor_meta(node).one_token
            return x if x.shape == shape else self._spread(x, shape)
        if target is aten.view_as_complex.default:
            self.units.unite(x)
            return x[..., 0]
        if target is aten.view_as_real.default:
            return torch.stack([x, x], -1)
        if target is aten.index.Tensor:
            return self._index(node, x)
        if (dims := reduced_dims(node)) is not None:
            rows = side_by_side(x, dims)
            self.units.unite(rows)
            return rows[..., 0].reshape(tensor_meta(node).one_token) if target in REDUCTIONS else x
        return None

    def _pointwise(self, node: fx.Node) -> Tensor:
        """Return the labels of a call that works element by element: its labelled operands' are joined."""
        shape = tensor_meta(node).one_token
        operands = [self.of[n] for n in node.all_input_nodes if n in self.of]
        full = [x for x in operands if x.shape == shape]
        made = full[0] if full else self.units.fresh(shape)
        for x in operands:
            (self.units.join if x.shape == shape else self.units.copy)(x, made)
        return made

    def _spread(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        made = self.units.fresh(shape)
        self.units.copy(x, made)
        return made

    def _join(self, node: fx.Node, target: Callable[..., Tensor]) -> Tensor:
        """Return the labels of tensors side by side. What is whole goes where its neighbours go."""
        return target([self._or_fresh(n) for n in as_nodes(node.args[0])], *node.args[1:])

    def _or_fresh(self, node: fx.Node) -> Tensor:
        labels = self.of.get(node)
        return self.units.fresh(tensor_meta(node).one_token) if labels is None else labels

    def _index(self, node: fx.Node, x: Tensor) -> Tensor | None:
        """Return the labels of rows taken of `x` by one tensor of indices, or None if it is not that."""
        indices = node.args[1]
        if not isinstance(indices, list | tuple):
            return None
        given = [i for i, n in enumerate(indices) if isinstance(n, fx.Node)]
        if len(given) != 1 or as_node(indices[given[0]]) in self.of:
            return None
        row = x.narrow(given[0], 0, 1)
        shape = tensor_meta(node).one_token
        return row.expand(shape) if len(shape) == x.ndim and torch.equal(row.expand(x.shape), x) else None

    def _attend(self, node: fx.Node) -> Tensor | None:
        """Return the labels of an attention's output. The columns of a KV head are one unit, and its queries' too."""
        call = AttendArguments.of(node)
        for n in (n for n in call.shared_rows if n in self.of):
            self.units.replicate(self.of[n])  # all heads attend to the tokens that one indexer chooses
        if call.kv_heads % self._members:
            self._replicate_inputs(node)
            return None
        own = [self._or_fresh(n).reshape(call.kv_heads, -1) for n in (call.k, call.q, call.v, *call.dealt_rows)]
        head = own[0][:, :1]
        for x in own:
            self.units.join(x, head.expand(x.shape))
        self.heads[node] = head[:, 0]
        shape = tensor_meta(node).one_token
        return head.expand(call.kv_heads, shape[-1] // call.kv_heads).reshape(shape)

    def _recur(self, node: fx.Node) -> Tensor | None:
        """Return the labels of a recurrence's output. A value head is one unit, with its decay and beta.

        A head of q and k is one unit with the value heads that it serves, or is on every member.
        """
        call = recur_arguments(node)
        units = call.units(self._members)
        if units is None:
            self._replicate_inputs(node)
            return None
        shared = [call.q, call.k] if call.shares_keys(self._members) else []
        for n in (n for n in shared if n in self.of):
            self.units.replicate(self.of[n])
        head = self._or_fresh(call.v).reshape(units, -1)[:, :1]
        for n in (n for n in call.rows if n not in shared):
            columns = self._or_fresh(n).reshape(units, -1)
            self.units.join(columns, head.expand(columns.shape))
        self.heads[node] = head[:, 0]
        shape = tensor_meta(node).one_token
        return head.expand(units, shape[-1] // units).reshape(shape)

    def _is_statistic(self, node: fx.Node, x: Tensor) -> bool:
        """Return whether members sum up parts of a reduction of `x`, so that the heads that it goes over can be dealt.

        They do next to an attention or a recurrence. Elsewhere what is reduced stays whole: a sum is not worth it.
        """
        dims = reduced_dims(node) or []
        rows = side_by_side(x, dims)
        if rows[..., 0].numel() >= self._members or not self.dealt(rows):
            return False
        heads = [self.units.of(labels) for labels in self.heads.values()]
        if not feeds_mixer(node) and not (heads and np.isin(self.units.of(rows), np.concatenate(heads)).all()):
            return False
        self.statistics[node] = dims
        return True

    def _replicate_inputs(self, node: fx.Node) -> None:
        """Let every member have all that a call reads."""
        for n in node.all_input_nodes:
            for labels in [self.of[n]] if n in self.of else self._parts.get(n, ()):
                self.units.replicate(labels)

    def _project(self, linear: Linear) -> Tensor | None:
        """Return the labels of a projection's outputs: new ones, or None if members have partial sums of all."""
        x, shape = self.of.get(linear.x), tensor_meta(linear.node).one_token
        if x is not None:
            x = self._inputs(linear, x)
        dealt = x is None and linear.one_row and linear.node not in self._experts
        y = self.units.fresh((linear.outputs,)).expand(shape) if dealt else None
        self.projections.append((linear, x, y))
        return y

    def _inputs(self, linear: Linear, x: Tensor) -> Tensor | None:
        """Return the labels of a projection's inputs, or None if every member has all of them.

        A projection of a projection is one of low rank: all members compute the first.
        """
        rows = x.reshape(-1, x.shape[-1])
        whole = linear.node in self._experts or made_by(linear.x).target in PROJECTIONS
        if linear.node.target is EXPERT_LINEAR and not whole:
            self.units.join(rows, rows[:1].expand(rows.shape))
            rows = rows[:1]
        if len(rows) == 1 and not whole and self.dealt(rows):
            return rows[0]
        self.units.replicate(x)
        return None


def made_by(node: fx.Node) -> fx.Node:
    """Return what computes a tensor that `node` is a view or a copy of."""
    while node.target in VIEWS | UNCHANGED:
        node = as_node(node.args[0])
    return node


def side_by_side(x: Tensor, dims: list[int]) -> Tensor:
    """Return `x` with its dimensions `dims` as the last one."""
    return x.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))


def fewer(units: Ints, members: int) -> bool:
    """Return whether there are fewer different units than members."""
    some = units[:: max(len(units) // members, 1)]
    return len(np.unique(some)) < members and len(np.unique(units)) < members
