"""What each element-wise operator of a graph is in steps of a fused kernel.

A handler appends the steps of its node and returns the node's value, or its values if it computes several tensors. It
raises Unlowerable for arguments that it does not take.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx

from hpcdecode._ops_cpu import Op
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.lower import complex_numbers, places, quantize, views
from hpcdecode.model.lower.instruction import Shape, Value
from hpcdecode.model.lower.lowering import Lowering, Unlowerable

aten = torch.ops.aten
MOST_TERMS = 64  # of a sum over another dimension than the last one

Handler = Callable[[Lowering, fx.Node], "Value | list[Value]"]


class OperatorResult(NamedTuple):
    """What a node's value is to be.

    Attributes:
        shape: Its shape for one token.
        narrow: True if it is to be rounded to bfloat16.
    """

    shape: Shape
    narrow: bool


def result_of(node: fx.Node) -> OperatorResult:
    """Return what the node's value is to be, rounded also by the cast that alone reads it."""
    about = tensor_meta(node)
    narrow = about.dtype == torch.bfloat16
    if not narrow and len(node.users) == 1:
        (user,) = node.users
        narrow = user.target in CASTS and tensor_meta(user).dtype == torch.bfloat16
    return OperatorResult(about.one_token, narrow)


def unary(op: Op) -> Handler:
    """Return the handler of op(x)."""

    def handler(low: Lowering, node: fx.Node) -> Value:
        if len(node.args) > 1 or node.kwargs:
            raise Unlowerable
        shape, narrow = result_of(node)
        return low.step(op, shape, low.operand(node.args[0]), narrow=narrow)

    return handler


def binary(op: Op) -> Handler:
    """Return the handler of op(x, y), of a tensor x and a tensor or number y."""

    def handler(low: Lowering, node: fx.Node) -> Value:
        a, b = node.args
        if node.kwargs:
            raise Unlowerable
        other: Value | float
        if isinstance(b, fx.Node):
            other = low.operand(b)
        elif op in (Op.add, Op.sub):  # torch rounds the number to the tensor's dtype here, but not in products
            other = torch.tensor(_number(b), dtype=tensor_meta(node).dtype).item()
        else:
            other = float(_number(b))
        shape, narrow = result_of(node)
        return low.step(op, shape, low.operand(a), other, narrow=narrow)

    return handler


def power(low: Lowering, node: fx.Node) -> Value:
    """Handle x ** 2 and x ** 3."""
    x, (shape, narrow) = low.operand(node.args[0]), result_of(node)
    if node.args[1] == 2:
        return low.step(Op.mul, shape, x, x, narrow=narrow)
    if node.args[1] == 3:
        return low.step(Op.mul, shape, low.step(Op.mul, shape, x, x), x, narrow=narrow)
    raise Unlowerable


def gelu(low: Lowering, node: fx.Node) -> Value:
    """Handle the GELU of x, by erf or approximated by tanh."""
    op = Op.gelu_tanh if node.kwargs.get("approximate") == "tanh" else Op.gelu
    shape, narrow = result_of(node)
    return low.step(op, shape, low.operand(node.args[0]), narrow=narrow)


def clamp(low: Lowering, node: fx.Node) -> Value:
    """Handle the bounds of x: x, min=None, max=None."""
    value, (shape, narrow) = low.operand(node.args[0]), result_of(node)
    for op, limit in zip((Op.maximum, Op.minimum), (*node.args[1:], None, None), strict=False):
        if limit is not None:
            value = low.step(op, shape, value, float(_number(limit)), narrow=narrow)
    return value


def mean_or_sum(low: Lowering, node: fx.Node) -> Value:
    """Handle the mean or the sum over a dimension that is not that of the tokens: x, [dim], keepdim=False."""
    value, about = low.operand(node.args[0]), tensor_meta(as_node(node.args[0]))
    rank, given = len(value.shape), node.args[1]
    dims = [views.whole(d) % rank for d in given] if isinstance(given, list | tuple) else []
    if len(dims) != 1 or about.token_dim in dims or set(node.kwargs) - {"dtype"}:
        raise Unlowerable
    scale = 1 / value.shape[dims[0]] if node.target is aten.mean.dim else 1.0
    if dims != [rank - 1]:
        return _sum_of_parts(low, node, value, dims[0], scale)
    shape, narrow = result_of(node)
    return low.reduce(Op.sum, value, shape, scale, narrow)


def _sum_of_parts(low: Lowering, node: fx.Node, value: Value, dim: int, scale: float) -> Value:
    """Return the sum of the few parts of a tensor along `dim`, in their order."""
    shape, narrow = result_of(node)
    count = value.shape[dim]
    if not 2 <= count <= MOST_TERMS or scale != 1:
        raise Unlowerable
    total, *terms = (value.part(dim, i, 1) for i in range(count))
    for i, term in enumerate(terms, 2):
        total = low.step(Op.add, term.shape, total, term, narrow=narrow and i == count)
    return total.reshaped(shape)


def softmax(low: Lowering, node: fx.Node) -> Value:
    """Handle a softmax over the last dimension: x, dim."""
    value, (shape, narrow) = low.operand(node.args[0]), result_of(node)
    places.require_last(node.args[0], node.args[1])
    reduced = (*shape[:-1], 1)
    exp = low.step(Op.exp, shape, low.step(Op.sub, shape, value, low.reduce(Op.most, value, reduced, 1.0)))
    return low.step(Op.div, shape, exp, low.reduce(Op.sum, exp, reduced, 1.0), narrow=narrow)


def layer_norm(low: Lowering, node: fx.Node) -> Value:
    """Handle a normalisation of the last dimension: x, [width], weight=None, bias=None, eps=1e-5."""
    x, width, weight, bias, eps = (*node.args, *(None, None, 1e-5)[len(node.args) - 2 :])[:5]
    value, (shape, narrow) = low.operand(x), result_of(node)
    if not isinstance(width, list | tuple) or list(width) != [shape[-1]]:
        raise Unlowerable
    reduced = (*shape[:-1], 1)
    centred = low.step(Op.sub, shape, value, low.reduce(Op.sum, value, reduced, 1 / shape[-1]))
    variance = low.reduce(Op.sum, low.step(Op.mul, shape, centred, centred), reduced, 1 / shape[-1])
    inverse = low.step(Op.rsqrt, reduced, low.step(Op.add, reduced, variance, _number(eps)))
    steps = [(Op.mul, inverse)]
    steps += [(Op.mul, low.operand(weight))] if weight is not None else []
    steps += [(Op.add, low.operand(bias))] if bias is not None else []
    for i, (op, operand) in enumerate(steps):
        centred = low.step(op, shape, centred, operand, narrow=narrow and i == len(steps) - 1)
    return centred


def rotated(low: Lowering, node: fx.Node) -> Value:
    """Handle quantize.rotated(x)."""
    shape = quantize.RotationShape.of(tensor_meta(node).one_token[-1])
    if shape is None:
        raise Unlowerable
    return low.rotate(low.operand(node.args[0]), shape.runs, shape.size)


def token_scale(low: Lowering, node: fx.Node) -> Value:
    """Handle quantize.token_scale(x)."""
    value, (shape, _) = low.operand(node.args[0]), result_of(node)
    peak = low.reduce(Op.peak, value, shape, 1 / quantize.INT8_MAX)
    return low.step(Op.maximum, shape, peak, quantize.MIN_SCALE)


def to_int8(low: Lowering, node: fx.Node) -> Value:
    """Handle quantize.to_int8(x, scale); the store rounds."""
    x, scale = (low.operand(argument) for argument in node.args)
    return low.step(Op.mul, x.shape, x, low.step(Op.reciprocal, scale.shape, scale))


def cast(low: Lowering, node: fx.Node) -> Value:
    """Handle a change of dtype."""
    if set(node.kwargs) - {"dtype", "device"}:
        raise Unlowerable
    value = low.operand(node.args[0])
    if tensor_meta(node).dtype == torch.bool and not value.flag:
        raise Unlowerable
    if tensor_meta(node).dtype == torch.bfloat16 and not value.narrow:
        return low.step(Op.copy, value.shape, value, narrow=True)
    return value


def _number(argument: object) -> float:
    """Return an argument that must be a number known now; raise Unlowerable for another."""
    if isinstance(argument, bool) or not isinstance(argument, int | float):
        raise Unlowerable
    return argument


CASTS = (aten._to_copy.default, aten.type_as.default)
INVERTED = (aten.bitwise_not.default, aten.logical_not.default)
FLAGS = frozenset({*CASTS, *INVERTED})  # what may make flags
VIEWS: dict[object, Handler] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), views.view),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), views.split),
    aten.unsqueeze.default: views.unsqueeze,
    aten.select.int: views.select,
    aten.transpose.int: views.transpose,
    aten.expand.default: views.expand,
    aten.slice.Tensor: views.slice_,
}
HANDLERS: dict[object, Handler] = {
    **VIEWS,
    **dict.fromkeys(CASTS, cast),
    aten.clone.default: views.same,
    aten.neg.default: unary(Op.neg),
    aten.sqrt.default: unary(Op.sqrt),
    aten.rsqrt.default: unary(Op.rsqrt),
    aten.reciprocal.default: unary(Op.reciprocal),
    aten.exp.default: unary(Op.exp),
    aten.tanh.default: unary(Op.tanh),
    aten.sigmoid.default: unary(Op.sigmoid),
    aten.silu.default: unary(Op.silu),
    aten.relu.default: unary(Op.relu),
    aten.softplus.default: unary(Op.softplus),
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
    **dict.fromkeys((aten.softmax.int, aten._softmax.default), softmax),
    aten.topk.default: places.topk,
    aten.gather.default: places.gather,
    aten.max.dim: places.largest,
    aten.scatter.value: places.marked,
    aten.zeros_like.default: places.zeros,
    **dict.fromkeys(INVERTED, places.inverted),
    aten.masked_fill.Scalar: places.filled,
    aten.cat.default: views.cat,
    operator.getitem: views.getitem,
    complex_numbers.product_of_pairs: complex_numbers.pairs_product,
    quantize.rotated: rotated,
    quantize.token_scale: token_scale,
    quantize.to_int8: to_int8,
    quantize.scaled: binary(Op.mul),
}
