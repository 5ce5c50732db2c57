"""Turn a trace and its cuts into slices. Slices of the same structure share one graph, which takes their weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import Argument, Target

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.clean import freeze
from hpcdecode.model.frontend.cut import STATIC, SYMBOL, Dependence, dependences, find_cuts
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.head_linear import HEAD_LINEAR, head_linear
from hpcdecode.model.frontend.meta import Meta, meta, size_of, tensor_meta
from hpcdecode.model.frontend.mixers import rows_of
from hpcdecode.model.frontend.operators import EXPERT_LINEAR, PROJECTIONS, Linear
from hpcdecode.model.frontend.trace import Trace

aten = torch.ops.aten
FOLD_NUMEL = 1 << 16  # expressions of weights alone, up to this size, are computed once at load


@dataclass
class SliceGroup:
    """One graph, and the slices that run it with weights of their own.

    Attributes:
        graph: ([o,] context..., weights...) -> (rows for the attention or recurrence..., context...), or (logits,) and
            the last hidden states if they are asked for.
        rows: Number of its results, the first ones, that tokens bring to the layer after it, side by side in memory.
        slices: Indices of the slices.
    """

    graph: fx.Graph
    rows: int = 0
    slices: list[int] = field(default_factory=list)


@dataclass
class Slice:
    """The part of a model between two attentions.

    Attributes:
        group: Index of the group whose graph it runs.
        take: Places of the tensors that its graph takes, in the context before it.
        weights: Static nodes of the trace whose values its graph takes.
        give: Where each tensor of the context after it comes from: a place >= 0 in the context before it, or ~j for the
            new tensor number j of its graph.
        context: The tensors of the context after it.
    """

    group: int
    take: tuple[int, ...]
    weights: tuple[fx.Node, ...]
    give: tuple[int, ...]
    context: tuple[fx.Node, ...]


@dataclass
class Split:
    """A model that is cut into slices.

    Attributes:
        trace: Trace of the model.
        slices: The n + 1 slices of a model of n attentions.
        groups: Groups of slices that share a graph.
        kinds: What each node of the trace depends on.
        hidden: Whether the last slice returns the last hidden states, too.
    """

    trace: Trace
    slices: list[Slice]
    groups: list[SliceGroup]
    kinds: dict[fx.Node, Dependence]
    hidden: bool = False


def split(trace: Trace, device: torch.device, hidden: bool = False) -> Split:
    """Cut a trace at its n attends into n + 1 slices (Lamina, section 5.3).

    Args:
        trace: The trace.
        device: What the slices run on.
        hidden: Whether the last slice is to return what the LM head takes, too.

    Raises:
        UserError: If that is asked for, and there is no LM head.
    """
    kinds = dependences(trace)
    cuts = find_cuts(trace, kinds)
    result = Split(trace, [], [], kinds, hidden)
    ends = [trace.logits, head_input(trace)] if hidden else [trace.logits]
    known: dict[SliceSignature, int] = {}
    before = trace.step_inputs
    for i in range(len(cuts) + 1):
        attend = trace.attends[i - 1] if i else None
        after = cuts[i] if i < len(cuts) else ()
        rows = rows_of(trace.attends[i]) if i < len(cuts) else ends
        fresh = [n for n in after if n not in before and n is not attend]
        given = [*before] if attend is None else [attend, *before]
        builder = Builder(trace, kinds, given, device)
        builder.build([*rows, *fresh])
        builder.rows = side_by_side(rows) if i < len(cuts) else 0
        group = known.setdefault(builder.signature(), len(result.groups))
        if group == len(result.groups):
            result.groups.append(SliceGroup(builder.graph(), builder.rows))
        result.groups[group].slices.append(i)
        take = tuple(before.index(n) for n in builder.used if n is not attend)
        give = tuple(before.index(n) if n in before else ~fresh.index(n) for n in after)
        result.slices.append(Slice(group, take, tuple(builder.weights), give, after))
        before = after
    return result


def head_input(trace: Trace) -> fx.Node:
    """Return what the LM head takes, the last hidden states [L, hidden]; raise UserError if it is no GEMM."""
    node = trace.logits
    while node.target not in PROJECTIONS:
        if node.op == "placeholder" or node in trace.attends:
            raise UserError("the logits are no product with a head, so that there are no hidden states to go on from")
        node = node.all_input_nodes[0]
    return Linear.of(node).x


def side_by_side(rows: Sequence[fx.Node]) -> int:
    """Return how many of the first of `rows` have the dtype of the first one."""
    dtypes = [tensor_meta(row).dtype for row in rows]
    return next((i for i, dtype in enumerate(dtypes) if dtype != dtypes[0]), len(rows))


class SliceSignature(NamedTuple):
    """What slices that one graph can serve have in common.

    Attributes:
        rows: Number of results that lie side by side.
        given: Number of inputs that are not weights.
        inputs: Shape and dtype of every input.
        calls: Target, args and kwargs of every call.
        results: Places of the results.
    """

    rows: int
    given: int
    inputs: tuple[Meta | None, ...]
    calls: tuple[tuple[str, Hashable, Hashable], ...]
    results: tuple[int, ...]


class Builder:
    """Collects one slice's nodes in depth-first order from its results, so that equal slices come out equal.

    Args:
        trace: Trace of the model.
        kinds: What each node of the trace depends on.
        given: Tensors that the slice may read: [the attention before it,] and the context.
        device: Device that the graph runs on.

    Attributes:
        used: Given tensors that the slice reads.
        weights: Static nodes whose values it reads.
        calls: Calls, in the order in which they run.
        results: Nodes that it returns.
        rows: Number of the first of them that lie side by side.
    """

    def __init__(self, trace: Trace, kinds: dict[fx.Node, Dependence], given: list[fx.Node], device: torch.device):
        self.trace, self.kinds, self.given, self.device = trace, kinds, given, device
        self.used: list[fx.Node] = []
        self.weights: list[fx.Node] = []
        self.calls: list[fx.Node] = []
        self.results: list[fx.Node] = []
        self.rows = 0
        sized = [n for n in (trace.logits_indices, given[0]) if n in given]
        self._sizes = {tensor_meta(n).shape[0]: n for n in sized}  # the given tensor that has a size

    def build(self, results: list[fx.Node]) -> None:
        """Collect the nodes that `results` need."""
        self.results = results
        seen: set[fx.Node] = set()
        stack = [(node, False) for node in reversed(results)]
        while stack:
            node, entered = stack.pop()
            if entered:
                self.calls.append(node)
            elif node not in seen:
                seen.add(node)
                if self._take_input(node):
                    continue
                stack.append((node, True))
                stack.extend((n, False) for n in reversed(node.all_input_nodes))
        first = self.given[:1] if self.given[0] in self.trace.attends else []
        self.used = list(dict.fromkeys([*first, *self.used]))

    def _take_input(self, node: fx.Node) -> bool:
        """Return whether `node` is an input of the slice, and note it if it is."""
        if node in self.given:
            self.used.append(node)
        elif (sized := self._sized_as(node)) is not None:
            self.used.append(sized)
        elif node.op == "placeholder" or self._is_folded(node):
            self.weights.append(node)
        else:
            return False
        return True

    def _sized_as(self, node: fx.Node) -> fx.Node | None:
        """Return the given tensor whose first size `node` is, or None if `node` is no such size."""
        size = size_of(node)
        return self._sizes.get(size) if self.kinds[node] == SYMBOL and size is not None else None

    def _is_folded(self, node: fx.Node) -> bool:
        """Return whether `node` is an expression of weights alone, computed once at load: a small one, or heads'."""
        if self.kinds[node] != STATIC or any(self.kinds[n] == SYMBOL for n in node.all_input_nodes):
            return False
        about = meta(node)
        of_heads = any(user.target is HEAD_LINEAR for user in node.users)
        return about is not None and about.static and (of_heads or about.numel_per_token <= FOLD_NUMEL)

    def signature(self) -> SliceSignature:
        """Return what this slice has in common with those that one graph can serve."""
        place = {n: i for i, n in enumerate([*self.used, *self.weights, *self.calls])}

        def name(node: fx.Node) -> Hashable:
            sized = self._sized_as(node)
            return place[node] if sized is None else ("size", place[sized])

        inputs = tuple(meta(n) for n in [*self.used, *self.weights])
        calls = tuple((str(n.target), freeze(n.args, name), freeze(n.kwargs, name)) for n in self.calls)
        return SliceSignature(self.rows, len(self.used), inputs, calls, tuple(place[n] for n in self.results))

    def graph(self) -> fx.Graph:
        """Return the slice's graph: ([o,] context..., weights...) -> its results."""
        graph = fx.Graph()
        new = {**placeholders(graph, "x", self.used), **placeholders(graph, "w", self.weights)}
        sizes: dict[fx.Node, fx.Node] = {}

        def value(node: fx.Node) -> fx.Node:
            sized = self._sized_as(node)
            if sized is None:
                return new[node]
            if sized not in sizes:
                sizes[sized] = graph.call_function(aten.sym_size.int, (new[sized], 0))
            return sizes[sized]

        for node in self.calls:
            kwargs: dict[str, Argument] = {k: fx.map_arg(v, value) for k, v in node.kwargs.items()}
            if "device" in kwargs:
                kwargs["device"] = self.device
            new[node] = graph.call_function(runnable(node.target), fx.map_arg(node.args, value), kwargs)
            new[node].meta = dict(node.meta)
        graph.output(tuple(new[n] for n in self.results))
        return graph


def placeholders(graph: fx.Graph, prefix: str, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Add a placeholder to `graph` for each of `nodes`, and return them by node."""
    made = {}
    for i, node in enumerate(nodes):
        made[node] = graph.placeholder(f"{prefix}{i}")
        made[node].meta = dict(node.meta)
    return made


def runnable(target: Target) -> Callable[..., Any]:
    """Return the function that a call of `target` runs: a plain one for operators that stand for one."""
    if not callable(target):
        raise TypeError(f"expected a function, got {target!r}")
    if target is aten._unsafe_view.default:  # of a result that a fused kernel may have laid out in another way
        return aten.reshape.default
    if target is HEAD_LINEAR:
        return head_linear
    return expert_linear if target is EXPERT_LINEAR else target
