"""Stages that follow on each other as one call, which takes a block of tokens at a time through all of them."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hpcdecode import _ops_cpu
from hpcdecode.model.lower.stage import Stage, TokenRows

LINE = 64  # bytes of a cache line

Output = tuple[fx.Node, int]  # a stage's call, and which of its results


@dataclass(frozen=True)
class Link:
    """Native work of a chain; what it reads and writes by names, and the bytes a token of what it writes."""

    work: _ops_cpu.Program | _ops_cpu.Product | _ops_cpu.Attention
    reads: tuple[Hashable, ...]
    writes: dict[Hashable, int]


def assemble(links: Sequence[Link], tensors: Sequence[Hashable]) -> _ops_cpu.Chain:
    """The chain that is called with `tensors`; whatever else links write, they hand on to each other."""
    passed = [name for link in links for name in link.writes if name not in tensors]
    places = {name: i for i, name in enumerate([*tensors, *passed])}
    stages = [(link.work, [places[name] for name in (*link.reads, *link.writes)]) for link in links]
    found = placed(links, passed)
    return _ops_cpu.Chain(stages, len(tensors), [found[name] for name in passed])


def placed(links: Sequence[Link], passed: Sequence[Hashable]) -> dict[Hashable, tuple[int, int]]:
    """Bytes a token of what links hand on, and where it begins; a place is taken again after its last reader.

    TokenRows are an odd number of cache lines apart, so that those of a tile do not fall into the same set of a cache.
    """
    last = {name: i for i, link in enumerate(links) for name in link.reads}
    found: dict[Hashable, tuple[int, int]] = {}
    free: list[tuple[int, int]] = []
    end = 0
    for i, link in enumerate(links):
        for name in (n for n in link.writes if n in passed):
            size = (-(-link.writes[name] // LINE) | 1) * LINE
            hole = min((hole for hole in free if hole[0] >= size), default=None)
            if hole is None:
                hole, end = (size, end), end + size
            else:
                free.remove(hole)
            found[name] = (size, hole[1])
        free += {found[name] for name in link.reads if name in found and last[name] == i}
    return found


class Chain:
    """A call of the stages that `steps` are calls of; takes `given`, returns `outputs`."""

    __module__ = __name__

    def __init__(self, steps: Sequence[fx.Node], outputs: Sequence[Output]):
        self.steps = list(steps)
        made = {(node, i): rows for node in steps for i, rows in enumerate(node.target.outputs)}
        inputs: dict[fx.Node, TokenRows] = {}
        self.links = []
        for node in steps:
            reads = tuple(source(arg) if source(arg) in made else arg for arg in node.args)
            inputs.update(
                (name, rows) for name, rows in zip(reads, node.target.inputs, strict=True) if name not in made
            )
            writes = {(node, i): rows.bytes for i, rows in enumerate(node.target.outputs)}
            self.links.append(Link(node.target.work, reads, writes))
        self.given, self.inputs = list(inputs), list(inputs.values())
        self.made, self.outputs = list(outputs), [made[output] for output in outputs]
        self.counted = next(i for i, rows in enumerate(self.inputs) if rows.dim is not None)
        self.native = assemble(self.links, [*self.given, *self.made])
        self.__name__ = f"chain_{id(self)}"

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        count = tensors[self.counted].shape[self.inputs[self.counted].dim]
        rows = [about.rows_of(x, count) for about, x in zip(self.inputs, tensors, strict=True)]
        made = [about.fresh(count) for about in self.outputs]
        places = [(x.data_ptr(), step) for x, step in rows + made]
        self.native.run(count, torch.get_num_threads(), *zip(*places, strict=True))
        results = [about.shaped(x, count) for about, (x, _) in zip(self.outputs, made, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)


def source(node: fx.Node) -> Output:
    """The call whose result `node` is, and which of its results."""
    return (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)


def chained(graph: fx.Graph) -> fx.Graph:
    """A graph of the same values in which stages that follow on each other are one call."""
    return Chaining(graph).run()


class Chaining:
    """Nodes are copied in their order, but for those that wait for the stages collected so far."""

    def __init__(self, graph: fx.Graph):
        self.old, self.made = graph, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.steps: list[fx.Node] = []
        self.parts: set[fx.Node] = set()  # single results of steps
        self.waiting: dict[fx.Node, None] = {}

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            if node.op == "output":
                self.finish()
                self.made.output(fx.map_arg(node.args[0], self.new.__getitem__))
            elif isinstance(node.target, Stage):
                follows = self.steps and node.target.symbol == self.steps[0].target.symbol
                if not follows or any(n in self.waiting for n in node.all_input_nodes):
                    self.finish()
                self.steps.append(node)
            elif node.target is operator.getitem and node.args[0] in self.steps:
                self.parts.add(node)
            elif any(n in self.steps or n in self.parts or n in self.waiting for n in node.all_input_nodes):
                self.waiting[node] = None
            else:
                self.copy(node)
        return self.made

    def copy(self, node: fx.Node) -> None:
        self.new[node] = self.made.node_copy(node, self.new.__getitem__)

    def finish(self) -> None:
        """Call the chain of the steps collected, and copy what waits for it."""
        if self.steps:
            self.call()
        for node in self.waiting:
            self.copy(node)
        self.steps, self.parts, self.waiting = [], set(), {}

    def call(self) -> None:
        results = [n for n in (*self.steps, *self.parts) if n in self.parts or len(n.target.outputs) == 1]
        read = {n: source(n) for n in results if any(user not in self.steps for user in n.users)}
        outputs = list(dict.fromkeys(read.values()))
        chain = Chain(self.steps, outputs)
        call = self.made.call_function(chain, tuple(self.new[n] for n in chain.given))
        for node, output in read.items():
            i = outputs.index(output)
            self.new[node] = call if len(outputs) == 1 else self.made.call_function(operator.getitem, (call, i))
