"""Let a convolution whose result only a recurrence reads be part of it: one exchange in place of two."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from hpcdecode.model.frontend.clean import remove_dead
from hpcdecode.model.frontend.meta import Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.origins import Origins, Untraceable
from hpcdecode.model.frontend.recurrent import CONV, CONV_RECUR, RECUR

aten = torch.ops.aten


class ConvolutionColumns(NamedTuple):
    """Columns of the result of a convolution, [T, channels].

    Attributes:
        of: The convolution.
        first: First of the columns.
        size: Number of the columns, which follow one another.
    """

    of: fx.Node
    first: int
    size: int


def join_convolutions(graph: fx.Graph) -> None:
    """Replace in `graph` every recurrence over q, k and v that come from convolutions, in place, by one operator."""
    for node in list(graph.nodes):
        if node.target is RECUR:
            parts = [_columns_of(as_node(x)) for x in node.args[:3]]
            if (found := [p for p in parts if p is not None]) and len(found) == 3 and _whole(found):
                _join(node, found, graph)
    remove_dead(graph)


def _columns_of(rows: fx.Node) -> ConvolutionColumns | None:
    """Return the columns of a convolution that `rows` are, or None if they are anything else."""
    origins = Origins()
    try:
        found = origins.places(origins.of(rows).flatten())
    except Untraceable:
        return None
    if found is None or found[0].target is not CONV:
        return None
    convolution, places = found
    first, size = int(places[0]), len(places)
    neighbours = torch.equal(places, torch.arange(first, first + size))
    return ConvolutionColumns(convolution, first, size) if neighbours else None


def _whole(parts: list[ConvolutionColumns]) -> bool:
    """Return whether q, k and v are all columns of their convolutions, which are of one kind."""
    convolutions = {p.of for p in parts}
    kinds = {(bool(c.args[3]), c.args[2] is None, tensor_meta(as_node(c.args[1])).shape[1]) for c in convolutions}
    read = sum(p.size for p in parts)
    return len(kinds) == 1 and read == sum(tensor_meta(c).one_token[-1] for c in convolutions)


def _join(recurrence: fx.Node, parts: list[ConvolutionColumns], graph: fx.Graph) -> None:
    with graph.inserting_before(recurrence):
        rows = [_columns(as_node(p.of.args[0]), 1, p, graph) for p in parts]
        weights = [_columns(as_node(p.of.args[1]), 0, p, graph) for p in parts]
        stated = [p.of.args[2] for p in parts]
        biases = [_columns(as_node(b), 0, p, graph) for b, p in zip(stated, parts, strict=True) if b is not None]
        silu = parts[0].of.args[3]
        joined = graph.call_function(CONV_RECUR, (*rows, *recurrence.args[3:], weights, biases, silu))
    joined.meta = dict(recurrence.meta)
    recurrence.replace_all_uses_with(joined)
    graph.erase_node(recurrence)


def _columns(whole: fx.Node, dim: int, part: ConvolutionColumns, graph: fx.Graph) -> fx.Node:
    """Return the entries of `whole` along `dim` that belong to columns of a convolution."""
    about = tensor_meta(whole)
    if part.size == about.shape[dim]:
        return whole
    columns = graph.call_function(aten.slice.Tensor, (whole, dim, part.first, part.first + part.size))
    shape = tuple(part.size if i == dim else size for i, size in enumerate(about.shape))
    columns.meta = {"about": Meta.of(about.dtype, shape)}
    return columns
