"""Handlers of operators that only move elements or view them anew; `handlers` says what a handler is."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import Argument

from hpcdecode._ops_cpu import Op
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.lower.instruction import Value
from hpcdecode.model.lower.lowering import Lowering, Unlowerable, broadcast, fresh

aten = torch.ops.aten


def whole(argument: object) -> int:
    """Return an argument that must be an int known now; raise Unlowerable for another."""
    if not isinstance(argument, int):
        raise Unlowerable
    return argument


def optional(argument: object) -> int | None:
    """Return an argument that must be None or an int known now; raise Unlowerable for another."""
    return None if argument is None else whole(argument)


def view(low: Lowering, node: fx.Node) -> Value:
    """Handle any operator that keeps the order of the elements.

    What comes before the token dimension must stay before it, else the node is not lowerable.
    """
    old, new = tensor_meta(as_node(node.args[0])), tensor_meta(node)
    if math.prod(old.one_token[: old.token_dim]) != math.prod(new.one_token[: new.token_dim]):
        raise Unlowerable
    return low.packed(low.operand(node.args[0])).reshaped(new.one_token)


def transpose(low: Lowering, node: fx.Node) -> Value:
    """Handle two dimensions that change places: x, a, b."""
    value, a, b = low.operand(node.args[0]), whole(node.args[1]), whole(node.args[2])
    order = list(range(len(value.shape)))
    order[a], order[b] = order[b], order[a]
    shape, strides = (tuple(x[i] for i in order) for x in (value.shape, value.strides))
    return replace(value, shape=shape, strides=strides)


def unsqueeze(low: Lowering, node: fx.Node) -> Value:
    """Handle a new dimension of size 1: x, dim."""
    value = low.operand(node.args[0])
    dim = whole(node.args[1]) % (len(value.shape) + 1)
    shape = (*value.shape[:dim], 1, *value.shape[dim:])
    strides = (*value.strides[:dim], 0, *value.strides[dim:])
    return replace(value, shape=shape, strides=strides)


def select(low: Lowering, node: fx.Node) -> Value:
    """Handle a dimension of size 1 that goes: x, dim, 0."""
    value, about = low.operand(node.args[0]), tensor_meta(as_node(node.args[0]))
    dim = whole(node.args[1]) % len(value.shape)
    if about.shape[dim] != 1:
        raise Unlowerable
    shape, strides = (x[:dim] + x[dim + 1 :] for x in (value.shape, value.strides))
    return replace(value, shape=shape, strides=strides)


def expand(low: Lowering, node: fx.Node) -> Value:
    """Handle a broadcast: x, sizes."""
    return broadcast(low.operand(node.args[0]), tensor_meta(node).one_token)


def same(low: Lowering, node: fx.Node) -> Value:
    """Handle an operator that returns the values of its first argument."""
    return low.operand(node.args[0])


def slice_(low: Lowering, node: fx.Node) -> Value:
    """Handle a slice of a dimension: x, dim=0, start=None, end=None, step=1."""
    arguments: list[Argument] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    x, along, start, end, step = arguments
    dim, size = _dimension(as_node(x), along)
    first, last, every = slice(optional(start), optional(end), whole(step)).indices(size)
    return low.operand(x).part(dim, first, last - first, every)


def split(low: Lowering, node: fx.Node) -> list[Value]:
    """Handle parts of a dimension: x, their one size or all sizes, dim=0."""
    x, given, along = (*node.args, 0)[:3]
    dim, size = _dimension(as_node(x), along)
    if isinstance(given, int):
        sizes = [min(given, size - at) for at in range(0, size, given)]
    elif isinstance(given, list | tuple):
        sizes = [whole(n) for n in given]
    else:
        raise Unlowerable
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [low.operand(x).part(dim, start, n) for start, n in zip(starts, sizes, strict=True)]


def getitem(low: Lowering, node: fx.Node) -> Value:
    """Handle one of the results of a split."""
    return low.parts[as_node(node.args[0])][whole(node.args[1])]


def cat(low: Lowering, node: fx.Node) -> Value:
    """Handle tensors side by side: tensors, dim=0."""
    tensors, along = (*node.args, 0)[:2]
    if not isinstance(tensors, list | tuple):
        raise Unlowerable
    parts = [low.operand(part) for part in tensors]
    dim, _ = _dimension(node, along)
    out, at = fresh(tensor_meta(node).one_token, all(part.narrow for part in parts)), 0
    for part in parts:
        low.emit(Op.copy, out.part(dim, at, part.shape[dim]), part)
        at += part.shape[dim]
    return out


def _dimension(node: fx.Node, dim: object) -> tuple[int, int]:
    """Return a dimension, counted from the front, and its size; raise Unlowerable for the token dimension."""
    shape = tensor_meta(node).shape
    place = whole(dim) % len(shape)
    return place, whole(shape[place])
