"""What each element-wise operator of a graph is in steps of a token program.

A handler appends the steps of its node, returns the node's value, and raises Unlowerable for arguments that it does
not take.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from hpcdecode._ops_cpu import Op
from hpcdecode.model.frontend.meta import meta
from hpcdecode.model.lower import quantize
from hpcdecode.model.lower.instruction import Shape, Value
from hpcdecode.model.lower.lowering import Lowering, Unlowerable, broadcast, fresh

aten = torch.ops.aten

Handler = Callable[[Lowering, fx.Node], "Value | list[Value]"]


def result(node: fx.Node) -> tuple[Shape, bool]:
    """Shape of the node's value, and whether it is to be rounded to bfloat16 (also by the cast that alone reads it)."""
    narrow = meta(node).dtype == torch.bfloat16
    if not narrow and len(node.users) == 1:
        (user,) = node.users
        narrow = user.target in CASTS and meta(user).dtype == torch.bfloat16
    return meta(node).one_token, narrow


def unary(op: Op) -> Handler:
    def handler(low: Lowering, node: fx.Node) -> Value:
        if len(node.args) > 1 or node.kwargs:
            raise Unlowerable
        shape, narrow = result(node)
        return low.step(op, shape, low.values[node.args[0]], narrow=narrow)

    return handler


def binary(op: Op) -> Handler:
    def handler(low: Lowering, node: fx.Node) -> Value:
        a, b = node.args
        if node.kwargs:
            raise Unlowerable
        shape, narrow = result(node)
        if not isinstance(a, fx.Node) or isinstance(b, bool):
            raise Unlowerable
        if isinstance(b, fx.Node):
            other = low.values[b]
        elif op in (Op.add, Op.sub):  # torch rounds the number to the tensor's dtype here, but not in products
            other = torch.tensor(b, dtype=meta(node).dtype).item()
        else:
            other = float(b)
        return low.step(op, shape, low.values[a], other, narrow=narrow)

    return handler


def power(low: Lowering, node: fx.Node) -> Value:
    x, (shape, narrow) = low.values[node.args[0]], result(node)
    if node.args[1] == 2:
        return low.step(Op.mul, shape, x, x, narrow=narrow)
    if node.args[1] == 3:
        return low.step(Op.mul, shape, low.step(Op.mul, shape, x, x), x, narrow=narrow)
    raise Unlowerable


def gelu(low: Lowering, node: fx.Node) -> Value:
    op = Op.gelu_tanh if node.kwargs.get("approximate") == "tanh" else Op.gelu
    shape, narrow = result(node)
    return low.step(op, shape, low.values[node.args[0]], narrow=narrow)


def clamp(low: Lowering, node: fx.Node) -> Value:
    value, (shape, narrow) = low.values[node.args[0]], result(node)
    for op, limit in zip((Op.maximum, Op.minimum), (*node.args[1:], None, None), strict=False):
        if limit is not None:
            value = low.step(op, shape, value, float(limit), narrow=narrow)
    return value


def mean_or_sum(low: Lowering, node: fx.Node) -> Value:
    x, shape = node.args[0], low.values[node.args[0]].shape
    dims = [d % len(shape) for d in node.args[1]]
    if dims != [len(shape) - 1] or meta(x).token_dim in dims or set(node.kwargs) - {"dtype"}:
        raise Unlowerable
    scale = 1 / shape[-1] if node.target is aten.mean.dim else 1.0
    out, narrow = result(node)
    return low.reduce(Op.sum, low.values[x], out, scale, narrow)


def layer_norm(low: Lowering, node: fx.Node) -> Value:
    x, width, weight, bias, eps = (*node.args, *(None, None, 1e-5)[len(node.args) - 2 :])[:5]
    value, (shape, narrow) = low.values[x], result(node)
    if list(width) != [shape[-1]]:
        raise Unlowerable
    reduced = (*shape[:-1], 1)
    centred = low.step(Op.sub, shape, value, low.reduce(Op.sum, value, reduced, 1 / shape[-1]))
    variance = low.reduce(Op.sum, low.step(Op.mul, shape, centred, centred), reduced, 1 / shape[-1])
    inverse = low.step(Op.rsqrt, reduced, low.step(Op.add, reduced, variance, eps))
    steps = [(Op.mul, inverse)]
    steps += [(Op.mul, low.values[weight])] if weight is not None else []
    steps += [(Op.add, low.values[bias])] if bias is not None else []
    for i, (op, operand) in enumerate(steps):
        centred = low.step(op, shape, centred, operand, narrow=narrow and i == len(steps) - 1)
    return centred


def token_scale(low: Lowering, node: fx.Node) -> Value:
    value, (shape, _) = low.values[node.args[0]], result(node)
    peak = low.reduce(Op.peak, value, shape, 1 / quantize.MOST)
    return low.step(Op.maximum, shape, peak, quantize.SMALLEST)


def to_int8(low: Lowering, node: fx.Node) -> Value:
    x, scale = (low.values[n] for n in node.args)
    return low.step(Op.mul, x.shape, x, low.step(Op.reciprocal, scale.shape, scale))


def cast(low: Lowering, node: fx.Node) -> Value:
    if set(node.kwargs) - {"dtype", "device"}:
        raise Unlowerable
    value = low.values[node.args[0]]
    if meta(node).dtype == torch.bfloat16 and not value.narrow:
        return low.step(Op.copy, value.shape, value, narrow=True)
    return value


def view(low: Lowering, node: fx.Node) -> Value:
    """Any node that keeps the elements' order: what comes before the token dimension must stay before it."""
    old, new = meta(node.args[0]), meta(node)
    if math.prod(old.one_token[: old.token_dim]) != math.prod(new.one_token[: new.token_dim]):
        raise Unlowerable
    return low.packed(low.values[node.args[0]]).reshaped(new.one_token)


def transpose(low: Lowering, node: fx.Node) -> Value:
    value, a, b = low.values[node.args[0]], node.args[1], node.args[2]
    order = list(range(len(value.shape)))
    order[a], order[b] = order[b], order[a]
    shape, strides = (tuple(x[i] for i in order) for x in (value.shape, value.strides))
    return replace(value, shape=shape, strides=strides)


def squeeze(low: Lowering, node: fx.Node) -> Value:
    """unsqueeze and select of a dimension of size 1: strides stay, a 1 comes or goes."""
    value, dim = low.values[node.args[0]], node.args[1]
    shape, strides = list(value.shape), list(value.strides)
    if node.target is aten.unsqueeze.default:
        dim %= len(shape) + 1
        shape.insert(dim, 1)
        strides.insert(dim, 0)
    else:
        dim %= len(shape)
        if meta(node.args[0]).shape[dim] != 1:
            raise Unlowerable
        del shape[dim], strides[dim]
    return replace(value, shape=tuple(shape), strides=tuple(strides))


def expand(low: Lowering, node: fx.Node) -> Value:
    return broadcast(low.values[node.args[0]], meta(node).one_token)


def same(low: Lowering, node: fx.Node) -> Value:
    return low.values[node.args[0]]


def span(node: fx.Node, dim: int) -> tuple[int, int]:
    """The dimension cut, counted from the front, and its size; raises Unlowerable for the token dimension."""
    about = meta(node)
    dim %= len(about.shape)
    if not isinstance(about.shape[dim], int):
        raise Unlowerable
    return dim, about.shape[dim]


def slice_(low: Lowering, node: fx.Node) -> Value:
    x, dim, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    dim, size = span(x, dim)
    start, end, step = slice(start, end, step).indices(size)
    return low.values[x].part(dim, start, end - start, step)


def split(low: Lowering, node: fx.Node) -> list[Value]:
    x, sizes, dim = (*node.args, 0)[:3]
    dim, size = span(x, dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, size - at) for at in range(0, size, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [low.values[x].part(dim, start, n) for start, n in zip(starts, sizes, strict=True)]


def getitem(low: Lowering, node: fx.Node) -> Value:
    return low.values[node.args[0]][node.args[1]]


def cat(low: Lowering, node: fx.Node) -> Value:
    parts, dim = (*node.args, 0)[:2]
    dim, _ = span(node, dim)
    out, at = fresh(meta(node).one_token, all(low.values[p].narrow for p in parts)), 0
    for part in parts:
        value = low.values[part]
        low.emit(Op.copy, out.part(dim, at, value.shape[dim]), value)
        at += value.shape[dim]
    return out


CASTS = (aten._to_copy.default, aten.type_as.default)
VIEWS: dict[object, Handler] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), view),
    **dict.fromkeys((aten.unsqueeze.default, aten.select.int), squeeze),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), split),
    aten.transpose.int: transpose,
    aten.expand.default: expand,
    aten.slice.Tensor: slice_,
}
HANDLERS: dict[object, Handler] = {
    **VIEWS,
    **dict.fromkeys(CASTS, cast),
    aten.clone.default: same,
    aten.neg.default: unary(Op.neg),
    aten.sqrt.default: unary(Op.sqrt),
    aten.rsqrt.default: unary(Op.rsqrt),
    aten.reciprocal.default: unary(Op.reciprocal),
    aten.exp.default: unary(Op.exp),
    aten.tanh.default: unary(Op.tanh),
    aten.sigmoid.default: unary(Op.sigmoid),
    aten.silu.default: unary(Op.silu),
    aten.relu.default: unary(Op.relu),
    aten.add.Tensor: binary(Op.add),
    aten.sub.Tensor: binary(Op.sub),
    aten.mul.Tensor: binary(Op.mul),
    aten.div.Tensor: binary(Op.div),
    aten.gelu.default: gelu,
    aten.pow.Tensor_Scalar: power,
    aten.clamp.default: clamp,
    aten.mean.dim: mean_or_sum,
    aten.sum.dim_IntList: mean_or_sum,
    aten.layer_norm.default: layer_norm,
    aten.cat.default: cat,
    operator.getitem: getitem,
    quantize.token_scale: token_scale,
    quantize.to_int8: to_int8,
    quantize.scaled: binary(Op.mul),
}
