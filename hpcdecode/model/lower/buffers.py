"""A compiled graph that writes its results into memory that it is given, in place of memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import Target

from hpcdecode.model.frontend.meta import Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_int, as_node, results
from hpcdecode.model.lower.compile import Compiled, compiled_by_torch, copied

aten = torch.ops.aten
OUT: dict[Target, Target] = {  # operators that write where they are told to, without a copy
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
    aten.cat.default: aten.cat.out,
}


class ResultPlace(NamedTuple):
    """Where a result lies.

    Attributes:
        buffer: Number of the buffer that holds it.
        columns: First and last + 1 of its columns there; None if it is all of the buffer.
    """

    buffer: int
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class WritingGraph:
    """What runs a graph that writes its results into buffers.

    Attributes:
        run: (buffers..., inputs..., weights...) -> nothing. Buffers must share no memory with inputs.
        buffers: Shapes and dtypes of the buffers.
        places: Where each result lies.
    """

    run: Callable[..., object]
    buffers: Sequence[Meta]
    places: Sequence[ResultPlace]


def writing(compiled: Compiled) -> WritingGraph:
    """Return what runs a compiled graph so that it writes its results into buffers.

    Results that are columns of one matrix, such as q, k and v, share a buffer.
    """
    graph = copied(compiled.graph)
    found = results(graph)
    wholes = list(dict.fromkeys(map(_whole, found)))
    with graph.inserting_before(next(iter(graph.nodes))):
        buffers = [graph.placeholder(f"to{i}") for i in range(len(wholes))]
    for whole, buffer in zip(wholes, buffers, strict=True):
        if whole.target in OUT and not compiled.by_torch:  # torch's compiler fuses the copy
            whole.target = OUT[whole.target]
            whole.kwargs = {**whole.kwargs, "out": buffer}
            continue
        with graph.inserting_before(graph.output_node()):
            graph.call_function(aten.copy_.default, (buffer, whole))
    places = [_place(node, wholes) for node in found]
    about = [tensor_meta(node) for node in wholes]
    graph.output_node().args = ((),)
    for node in [n for n in found if n not in wholes and not n.users]:
        graph.erase_node(node)
    run: Callable[..., tuple[Tensor, ...]] = fx.GraphModule({}, graph).forward
    return WritingGraph(compiled_by_torch(run) if compiled.by_torch else run, about, places)


def _whole(node: fx.Node) -> fx.Node:
    """Return the matrix that a result is columns of, or the result itself."""
    return as_node(node.args[0]) if node.target is aten.narrow.default and node.args[1] == 1 else node


def _place(node: fx.Node, wholes: Sequence[fx.Node]) -> ResultPlace:
    buffer = wholes.index(_whole(node))
    if node in wholes:
        return ResultPlace(buffer)
    first, count = map(as_int, node.args[2:])
    return ResultPlace(buffer, (first, first + count))
