"""The operator of a projection of each head by a weight of its own."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.fx.node import Target

from hpcdecode.model.frontend.rows import linear


@functools.cache
def define() -> None:
    """Define `hpcdecode::head_linear` for torch, once."""
    made = torch.library.custom_op(
        "hpcdecode::head_linear", head_linear, mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor"
    )
    made.register_fake(_projected)


def _projected(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] * weight.shape[1])


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the columns of each head by the head's weight.

    Args:
        x: Rows [T, heads * in].
        weight: Weights [heads, out, in].

    Returns:
        [T, heads * out].
    """
    heads, outputs, inputs = weight.shape
    if x.device.type != "cpu":
        by_head = torch.bmm(x.view(-1, heads, inputs).transpose(0, 1), weight.mT)
        return by_head.transpose(0, 1).reshape(-1, heads * outputs)
    out = x.new_empty(len(x), heads * outputs)
    for own, result, one in zip(x.split(inputs, 1), out.split(outputs, 1), weight, strict=True):
        result.copy_(linear(own, one))
    return out


define()
HEAD_LINEAR: Target = torch.ops.hpcdecode.head_linear.default
