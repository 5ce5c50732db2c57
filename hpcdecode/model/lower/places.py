"""Handlers of operators by which routers choose experts; `handlers` says what a handler is.

Places in a row are whole numbers, and flags are 0 or 1, as float32.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import Argument

from hpcdecode._ops_cpu import Op
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.lower import views
from hpcdecode.model.lower.instruction import Value
from hpcdecode.model.lower.lowering import Lowering, Unlowerable

aten = torch.ops.aten


def is_places(node: fx.Node) -> bool:
    """Return True if the node computes the places of the largest elements of a row."""
    return (
        node.target is operator.getitem
        and as_node(node.args[0]).target is aten.topk.default
        and tensor_meta(node).dtype == torch.int64
    )


def topk(low: Lowering, node: fx.Node) -> list[Value]:
    """Handle the largest elements of the last dimension, and their places: x, k, dim=-1, largest=True, sorted=True."""
    given: list[Argument] = [*node.args, *(-1, True, True)[len(node.args) - 2 :]]
    x, count, dim, largest, _ = given
    if not largest or set(node.kwargs) - {"sorted"}:
        raise Unlowerable
    require_last(x, dim)
    value = low.operand(x)
    places = low.top(value, views.whole(count))
    return [low.pick(value, places), places]


def gather(low: Lowering, node: fx.Node) -> Value:
    """Handle the elements of the last dimension at some places: x, dim, places."""
    x, dim, at = node.args
    require_last(x, dim)
    value, places = low.operand(x), low.operand(at)
    if node.kwargs or value.shape[:-1] != places.shape[:-1]:
        raise Unlowerable
    return low.pick(value, places)


def largest(low: Lowering, node: fx.Node) -> list[Value]:
    """Handle the largest element of the last dimension: x, dim, keepdim=False. Its place is not known."""
    x, dim = node.args[:2]
    require_last(x, dim)
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        raise Unlowerable
    value, keeps = low.operand(x), bool(node.args[2:] and node.args[2])
    shape = (*value.shape[:-1], 1) if keeps else value.shape[:-1]
    return [replace(low.reduce(Op.most, value, shape, 1.0), narrow=value.narrow)]


def marked(low: Lowering, node: fx.Node) -> Value:
    """Handle ones at some places of zeros: zeros, dim, places, 1."""
    zeros, dim, at, number = node.args
    places, shape = low.operand(at), tensor_meta(node).one_token
    require_last(zeros, dim)
    if as_node(zeros).target is not aten.zeros_like.default or number != 1 or places.shape[:-1] != shape[:-1]:
        raise Unlowerable
    return low.mark(places, shape)


def zeros(low: Lowering, node: fx.Node) -> Value:
    """Handle zeros that are marked, whose value `marked` does not read."""
    if any(user.target is not aten.scatter.value or user.args[0] is not node for user in node.users):
        raise Unlowerable
    return low.operand(node.args[0])


def inverted(low: Lowering, node: fx.Node) -> Value:
    """Handle flags that are set where others are not."""
    value = low.operand(node.args[0])
    if not value.flag:
        raise Unlowerable
    made = low.step(Op.add, value.shape, low.step(Op.neg, value.shape, value), 1.0)
    return replace(made, flag=True)


def filled(low: Lowering, node: fx.Node) -> Value:
    """Handle a number where flags are set: x, flags, number."""
    x, flags, number = node.args
    value, set_ = low.operand(x), low.operand(flags)
    if not set_.flag or value.shape != tensor_meta(node).one_token or not isinstance(number, int | float):
        raise Unlowerable
    if value.narrow:
        raise Unlowerable
    return low.fill(value, set_, float(number))


def require_last(x: Argument, dim: object) -> None:
    """Raise Unlowerable unless a dimension of a node's tensor is the last one, and does not count tokens."""
    shape = tensor_meta(as_node(x)).shape
    if views.whole(dim) % len(shape) != len(shape) - 1 or isinstance(shape[-1], str):
        raise Unlowerable
