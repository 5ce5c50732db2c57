"""Which columns of which tensors a row consists of, where a graph only moves them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import Target

from hpcdecode.model.frontend.clean import VIEWS
from hpcdecode.model.frontend.meta import TOKENS, size_of, tensor_meta

aten = torch.ops.aten
EXAMPLE_TOKENS = 2
MOVES: frozenset[Target] = VIEWS | {
    aten.alias.default,
    aten.cat.default,
    aten.clone.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.unsqueeze.default,
    operator.getitem,
}


class Moved(Exception):
    """A row does not consist of columns of tensors [T, columns] alone."""


class Columns(NamedTuple):
    """Columns of one tensor.

    Attributes:
        of: The tensor, [T, columns].
        first: First of the columns.
        size: Number of the columns, which follow one another.
    """

    of: fx.Node
    first: int
    size: int


def columns_of(row: fx.Node, is_source: Callable[[fx.Node], bool]) -> Columns | None:
    """Return the columns of a source that the tensor `row` [T, columns] consists of, or None if it is anything else.

    Args:
        row: The tensor.
        is_source: Whether a node is a tensor [T, columns] at which the search ends.
    """
    sources: list[fx.Node] = []
    try:
        places = _Places(is_source, sources).of(row)
    except Moved:
        return None
    first, size = int(places[0, 0]), places.shape[1]
    width = tensor_meta(sources[0]).one_token[-1]
    expected = first + torch.arange(EXAMPLE_TOKENS)[:, None] * width + torch.arange(size)
    if len(sources) != 1 or not torch.equal(places, expected):
        return None
    return Columns(sources[0], first, size)


class _Places:
    """Runs what moves the elements of sources on tensors that hold the place of each element in its source."""

    def __init__(self, is_source: Callable[[fx.Node], bool], sources: list[fx.Node]):
        self._is_source, self._sources = is_source, sources
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: fx.Node) -> Any:
        if self._is_source(node):
            self._sources.append(node)
            return torch.arange(EXAMPLE_TOKENS * tensor_meta(node).one_token[-1]).view(EXAMPLE_TOKENS, -1)
        if (size := size_of(node)) is not None:
            if size != TOKENS:
                raise Moved
            return EXAMPLE_TOKENS
        if node.target not in MOVES:
            raise Moved
        args: Any = fx.map_arg(node.args, self.of)
        target: Any = aten.reshape.default if node.target in VIEWS else node.target
        moved: Tensor = target(*args)
        return moved
