"""Turn a trace and its cuts into slices; slices of the same structure share one graph, their weights are inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.clean import freeze
from hpcdecode.model.frontend.cut import STATIC, SYMBOL, find_cuts, node_kinds
from hpcdecode.model.frontend.meta import meta, size_of
from hpcdecode.model.frontend.trace import Trace

aten = torch.ops.aten
FOLD_NUMEL = 1 << 16  # expressions of weights alone, up to this size, are computed once at load


@dataclass
class Group:
    """One graph, and the slices that run it with weights of their own."""

    graph: fx.Graph  # ([o,] context..., weights...) -> (q, k, v, context...) or (logits,)
    slices: list[int] = field(default_factory=list)


@dataclass
class Slice:
    group: int
    take: tuple[int, ...]  # places in the context handed in
    weights: tuple[fx.Node, ...]  # static nodes of the trace
    give: tuple[int, ...]  # context handed on: >= 0 a place in the one handed in, else ~ of a new tensor
    context: tuple[fx.Node, ...]  # the tensors handed on


@dataclass
class Split:
    trace: Trace
    slices: list[Slice]
    groups: list[Group]
    kinds: dict[fx.Node, str]


def split(trace: Trace, device: torch.device) -> Split:
    """Cut `trace` at its n attends into n + 1 slices (Lamina 5.3)."""
    kinds = node_kinds(trace)
    cuts = find_cuts(trace, kinds)
    result = Split(trace, [], [], kinds)
    known: dict[tuple, int] = {}
    before: tuple[fx.Node, ...] = (trace.ids, trace.positions, trace.logits_indices)
    for i in range(len(cuts) + 1):
        attend = trace.attends[i - 1] if i else None
        after = cuts[i] if i < len(cuts) else ()
        results = trace.attends[i].args[:3] if i < len(cuts) else (trace.logits,)
        fresh = [n for n in after if n not in before and n is not attend]
        given = ([attend] if i else []) + list(before)
        builder = Builder(trace, kinds, given, device)
        builder.build([*results, *fresh])
        group = known.setdefault(builder.signature(), len(result.groups))
        if group == len(result.groups):
            result.groups.append(Group(builder.graph()))
        result.groups[group].slices.append(i)
        take = tuple(before.index(n) for n in builder.used if n is not attend)
        give = tuple(before.index(n) if n in before else ~fresh.index(n) for n in after)
        result.slices.append(Slice(group, take, tuple(builder.weights), give, after))
        before = after
    return result


class Builder:
    """Collects one slice's nodes in depth-first order from its results, so that equal slices come out equal."""

    def __init__(self, trace: Trace, kinds: dict[fx.Node, str], given: list[fx.Node], device: torch.device):
        self.trace, self.kinds, self.given, self.device = trace, kinds, given, device
        self.used: list[fx.Node] = []  # of the given tensors
        self.weights: list[fx.Node] = []
        self.calls: list[fx.Node] = []
        self.results: list[fx.Node] = []

    def build(self, results: list[fx.Node]) -> None:
        self.results = results
        self.sizes = {meta(n).shape[0]: n for n in (self.trace.logits_indices, self.given[0]) if n in self.given}
        seen: set[fx.Node] = set()
        stack = [(node, False) for node in reversed(results)]
        while stack:
            node, entered = stack.pop()
            if entered:
                self.calls.append(node)
            elif node not in seen:
                seen.add(node)
                if self.is_leaf(node):
                    continue
                stack.append((node, True))
                stack.extend((n, False) for n in reversed(node.all_input_nodes))
        first = self.given[:1] if self.given[0] in self.trace.attends else []
        self.used = list(dict.fromkeys([*first, *self.used]))

    def is_leaf(self, node: fx.Node) -> bool:
        if node in self.given:
            self.used.append(node)
        elif self.is_size(node):
            self.used.append(self.sizes[size_of(node)])
        elif node.op == "placeholder" or self.is_folded(node):
            self.weights.append(node)
        else:
            return False
        return True

    def is_size(self, node: fx.Node) -> bool:
        return self.kinds[node] == SYMBOL and size_of(node) in self.sizes

    def is_folded(self, node: fx.Node) -> bool:
        if self.kinds[node] != STATIC or any(self.kinds[n] == SYMBOL for n in node.all_input_nodes):
            return False
        about = meta(node)
        return about is not None and about.static and about.numel_per_token <= FOLD_NUMEL

    def signature(self) -> tuple:
        """Equal for slices that one graph can serve: same calls on same places, same shapes and dtypes of inputs."""
        place = {n: i for i, n in enumerate([*self.used, *self.weights, *self.calls])}

        def name(node: fx.Node):
            return ("size", place[self.sizes[size_of(node)]]) if self.is_size(node) else place[node]

        inputs = tuple(meta(n) for n in [*self.used, *self.weights])
        calls = tuple((str(n.target), freeze(n.args, name), freeze(n.kwargs, name)) for n in self.calls)
        return len(self.used), inputs, calls, tuple(place[n] for n in self.results)

    def graph(self) -> fx.Graph:
        graph, new = fx.Graph(), {}
        for kind, nodes in (("x", self.used), ("w", self.weights)):
            for i, node in enumerate(nodes):
                new[node] = graph.placeholder(f"{kind}{i}")
                new[node].meta = dict(node.meta)
        sizes: dict[str, fx.Node] = {}

        def value(node: fx.Node) -> fx.Node:
            if not self.is_size(node):
                return new[node]
            size = size_of(node)
            if size not in sizes:
                sizes[size] = graph.call_function(aten.sym_size.int, (new[self.sizes[size]], 0))
            return sizes[size]

        for node in self.calls:
            kwargs = {k: self.device if k == "device" else fx.map_arg(v, value) for k, v in node.kwargs.items()}
            new[node] = graph.call_function(runnable(node.target), fx.map_arg(node.args, value), kwargs)
            new[node].meta = dict(node.meta)
        graph.output(tuple(new[n] for n in self.results))
        return graph


def runnable(target):
    """Operators that stand for a plain function in the trace are called as that function."""
    return ops.expert_linear if target is torch.ops.hpcdecode.expert_linear.default else target
