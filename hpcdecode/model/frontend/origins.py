"""Where the columns of a tensor come from: the operators that only move elements, run on numbers that name elements."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Target

from hpcdecode.model.frontend.clean import VIEWS
from hpcdecode.model.frontend.meta import TOKENS, meta, size_of, tensor_meta
from hpcdecode.model.frontend.operators import JOINS, MOVES

aten = torch.ops.aten
SHAPED: frozenset[Target] = VIEWS | {aten.expand.default}  # argument 1 is the shape of the result
MOVING: frozenset[Target] = (
    MOVES | JOINS | SHAPED | {aten.alias.default, aten.clone.default, aten.contiguous.default, operator.getitem}
)
_LEAF = 1 << 40  # elements that a leaf may have


class Untraceable(Exception):
    """A tensor's elements cannot be followed: its size for one token is not known."""


class Origins:
    """The elements of one token of graph nodes, followed through operators that only move them.

    The tensors that other operators compute are leaves.
    """

    def __init__(self) -> None:
        self._leaves: list[fx.Node] = []
        self._values: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Tensor:
        """Return numbers for the elements of one token of `node`, int64 in its shape. Equal elements have equal ones.

        Raises:
            Untraceable: If they cannot be followed.
        """
        value = self._value(node)
        if not isinstance(value, Tensor):
            raise Untraceable
        return value

    def places(self, numbers: Tensor) -> tuple[fx.Node, Tensor] | None:
        """Return the leaf that computes all elements with these numbers, and their places there, or None."""
        leaves = (numbers // _LEAF).unique()
        return (self._leaves[int(leaves)], numbers % _LEAF) if len(leaves) == 1 else None

    def source(self, numbers: Tensor) -> fx.Node | None:
        """Return the first node followed so far that has the elements of these numbers, in order and no others."""
        for node, value in self._values.items():
            if isinstance(value, Tensor) and torch.equal(value.flatten(), numbers):
                return node
        return None

    def _value(self, node: fx.Node) -> Any:
        if node not in self._values:
            self._values[node] = self._moved(node) if node.target in MOVING else self._leaf(node)
        return self._values[node]

    def _moved(self, node: fx.Node) -> Any:
        if node.target in SHAPED:
            whole, shape = self._value(node.all_input_nodes[0]), tensor_meta(node).one_token
            return whole.expand(shape) if node.target is aten.expand.default else whole.reshape(shape)
        target: Any = node.target
        return target(*fx.map_arg(node.args, self._value))

    def _leaf(self, node: fx.Node) -> Any:
        if size_of(node) == TOKENS:
            return 1
        about = meta(node)
        if about is None:
            raise Untraceable
        self._leaves.append(node)
        first = (len(self._leaves) - 1) * _LEAF
        return torch.arange(first, first + about.numel_per_token).view(about.one_token)
