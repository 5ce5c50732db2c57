"""Stages that follow on each other as one call, which takes a block of tokens at a time through all of them."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from hpcdecode import _ops_cpu
from hpcdecode.model.frontend.nodes import as_int, as_node
from hpcdecode.model.lower.stage import Stage, TokenRows

LINE = 64  # bytes of a cache line


class ChainOutput(NamedTuple):
    """One result of a call: the node of the call, and the number of the result."""

    call: fx.Node
    number: int


class StageCall(NamedTuple):
    """A call of a stage in a graph: its node, and the stage."""

    node: fx.Node
    stage: Stage


@dataclass(frozen=True)
class Link:
    """Native work of a chain, and the tensors that it reads and writes.

    Attributes:
        work: The native object.
        reads: Names of the tensors that it reads, in the order of its arguments.
        writes: Bytes that a token has in each tensor that it writes, by the tensor's name.
    """

    work: (
        _ops_cpu.FusedKernel
        | _ops_cpu.Product
        | _ops_cpu.ExpertProduct
        | _ops_cpu.AdapterProduct
        | _ops_cpu.AdapterSum
        | _ops_cpu.Attention
    )
    reads: Sequence[Hashable]
    writes: Mapping[Hashable, int]


class ChainPlace(NamedTuple):
    """Where a tensor that links hand on lies in the memory of a block of tokens, in bytes of one token.

    Attributes:
        size: Bytes that a token has.
        begin: Bytes before them.
    """

    size: int
    begin: int


@dataclass(frozen=True)
class SharedRows:
    """Rows that several tensors share, which links hand on as one.

    Attributes:
        name: Name of the rows.
        size: Bytes that a token has in them.
        begins: Where each tensor begins in a row, in bytes, by its name.
    """

    name: Hashable
    size: int
    begins: Mapping[Hashable, int]


def assemble(links: Sequence[Link], tensors: Sequence[Hashable], shared: Sequence[SharedRows] = ()) -> _ops_cpu.Chain:
    """Return the native chain of the links.

    Args:
        links: Work in the order in which it runs.
        tensors: Names of the tensors of a call. All others that links write, they hand on to each other.
        shared: Rows that some of the others share.
    """
    passed = [name for link in links for name in link.writes if name not in tensors] + [rows.name for rows in shared]
    numbers = {name: i for i, name in enumerate([*tensors, *passed])}
    stages = [(link.work, [numbers[name] for name in (*link.reads, *link.writes)]) for link in links]
    places, inside = placed(links, passed, shared), {n: at for rows in shared for n, at in rows.begins.items()}
    return _ops_cpu.Chain(stages, len(tensors), [(*places[name], inside.get(name, 0)) for name in passed])


def placed(
    links: Sequence[Link], passed: Sequence[Hashable], shared: Sequence[SharedRows] = ()
) -> dict[Hashable, ChainPlace]:
    """Return the places of the tensors that links hand on, or of the rows that they share, by name.

    A place is taken again after its last reader. Sizes are an odd number of cache lines, so that the rows of a tile
    do not fall into the same set of a cache.
    """
    rows = {name: each for each in shared for name in (each.name, *each.begins)}
    whole = {name: each.name for name, each in rows.items()}
    last = {whole.get(name, name): i for i, link in enumerate(links) for name in link.reads}
    found: dict[Hashable, ChainPlace] = {}
    free: list[ChainPlace] = []
    end = 0
    for i, link in enumerate(links):
        for name in (n for n in link.writes if n in passed and whole.get(n, n) not in found):
            size = odd_lines(rows[name].size if name in rows else link.writes[name])
            hole = min((hole for hole in free if hole.size >= size), default=None)
            if hole is None:
                hole, end = ChainPlace(size, end), end + size
            else:
                free.remove(hole)
            found[whole.get(name, name)] = ChainPlace(size, hole.begin)
        read = {whole.get(name, name) for name in link.reads}
        free += {found[name] for name in read if name in found and last[name] == i}
    return found | {name: found[each.name] for name, each in rows.items()}


def odd_lines(size: int) -> int:
    """Return the bytes of the least odd number of cache lines that hold `size` bytes."""
    return (-(-size // LINE) | 1) * LINE


class Chain:
    """Calls of stages as one call.

    Attributes:
        calls: The calls of stages, in their order.
        given: Nodes whose values the call takes, in their order.
        inputs: Layouts of those.
        made: Results that the call returns, in their order.
        outputs: Layouts of those.
        links: The native work.
        native: The native chain.
    """

    __module__ = __name__

    def __init__(self, calls: Sequence[StageCall], made: Sequence[ChainOutput]):
        self.calls = list(calls)
        written = {ChainOutput(node, i): rows for node, stage in calls for i, rows in enumerate(stage.outputs)}
        inputs: dict[fx.Node, TokenRows] = {}
        self.links: list[Link] = []
        for node, stage in calls:
            reads: list[Hashable] = []
            for argument, rows in zip(node.args, stage.inputs, strict=True):
                value = as_node(argument)
                output = source(value)
                if output not in written:
                    inputs[value] = rows
                reads.append(output if output in written else value)
            writes: dict[Hashable, int] = {ChainOutput(node, i): rows.bytes for i, rows in enumerate(stage.outputs)}
            self.links.append(Link(stage.work, reads, writes))
        self.given, self.inputs = list(inputs), list(inputs.values())
        self.made, self.outputs = list(made), [written[output] for output in made]
        self._counted, self._count_dim = next((i, r.dim) for i, r in enumerate(self.inputs) if r.dim is not None)
        self.native = assemble(self.links, [*self.given, *self.made])
        self.__name__ = f"chain_{id(self)}"

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the stages.

        Args:
            tensors: Values of the nodes `given`.

        Returns:
            The results `made`; a tensor if it is one.
        """
        count = tensors[self._counted].shape[self._count_dim]
        rows = [layout.rows_of(x, count) for layout, x in zip(self.inputs, tensors, strict=True)]
        made = [layout.fresh(count) for layout in self.outputs]
        addresses = [x.data_ptr() for x, _ in rows + made]
        row_bytes = [step for _, step in rows + made]
        self.native.run(count, torch.get_num_threads(), addresses, row_bytes)
        results = [layout.shaped(x, count) for layout, (x, _) in zip(self.outputs, made, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)


def source(node: fx.Node) -> ChainOutput:
    """Return the call whose result `node` is, and which of its results."""
    if node.target is not operator.getitem:
        return ChainOutput(node, 0)
    call, number = node.args
    return ChainOutput(as_node(call), as_int(number))


def chained(graph: fx.Graph) -> fx.Graph:
    """Return a graph of the same values in which stages that follow on each other are one call."""
    return ChainBuilder(graph).run()


class ChainBuilder:
    """Copies nodes in their order, but for those that wait for the stages collected so far.

    Attributes:
        old: The graph that is copied.
        made: The copy.
        new: Nodes of the copy by those of the old graph.
        calls: The calls of stages collected for the next chain.
        parts: Nodes of single results of those.
        waiting: Nodes that read results of those.
    """

    def __init__(self, graph: fx.Graph):
        self.old, self.made = graph, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.calls: dict[fx.Node, Stage] = {}
        self.parts: dict[fx.Node, None] = {}
        self.waiting: dict[fx.Node, None] = {}

    def run(self) -> fx.Graph:
        """Return the copy with chains."""
        for node in self.old.nodes:
            if node.op == "output":
                self._finish()
                self.made.output(fx.map_arg(node.args[0], self.new.__getitem__))
            elif isinstance(node.target, Stage):
                if not self._follows(node, node.target):
                    self._finish()
                self.calls[node] = node.target
            elif node.target is operator.getitem and node.args[0] in self.calls:
                self.parts[node] = None
            elif any(n in self.calls or n in self.parts or n in self.waiting for n in node.all_input_nodes):
                self.waiting[node] = None
            else:
                self._copy(node)
        return self.made

    def _follows(self, node: fx.Node, stage: Stage) -> bool:
        """Return True if a call of a stage can join those collected."""
        alike = all((stage.symbol, stage.whole) == (each.symbol, each.whole) for each in self.calls.values())
        return alike and not any(n in self.waiting for n in node.all_input_nodes)

    def _copy(self, node: fx.Node) -> None:
        self.new[node] = self.made.node_copy(node, self.new.__getitem__)

    def _finish(self) -> None:
        """Call the chain of the stages collected, and copy what waits for it."""
        if self.calls:
            self._call()
        for node in self.waiting:
            self._copy(node)
        self.calls, self.parts, self.waiting = {}, {}, {}

    def _call(self) -> None:
        single = [node for node, stage in self.calls.items() if len(stage.outputs) == 1]
        read = {n: source(n) for n in (*single, *self.parts) if any(user not in self.calls for user in n.users)}
        outputs = list(dict.fromkeys(read.values()))
        chain = Chain([StageCall(*call) for call in self.calls.items()], outputs)
        call = self.made.call_function(chain, tuple(self.new[n] for n in chain.given))
        for node, output in read.items():
            i = outputs.index(output)
            self.new[node] = call if len(outputs) == 1 else self.made.call_function(operator.getitem, (call, i))
