"""int8 weights: a scale for every output, and for every token of the input, which is rounded just before its product.

y = (round(x / s) @ round(w / r).T) * s * r with s = max|x| / 127 of a token and r = max|w| / 127 of an output, as
LLM.int8 (Dettmers et al. 2022) has it without its outliers. oneDNN multiplies; rounding and scaling are steps of the
token programs before and after.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hpcdecode.model.frontend.rows import as_rows, as_tokens

MOST = 127
SMALLEST = 1e-30  # scale, of zeros
NARROW = 16  # a projection to fewer outputs than this part of its inputs, a router of experts, stays as it is


def output_scales(weight: Tensor) -> Tensor:
    """float32 [out] of a weight [out, in]."""
    return weight.abs().amax(1).float().div(MOST).clamp(min=SMALLEST)


def quantized(weight: Tensor) -> Tensor:
    """int8 [out, in] of a weight [out, in]."""
    rounded = weight.to(torch.float32, copy=True).div_(output_scales(weight)[:, None]).round_()
    return rounded.to(torch.int8)


def pack(weight: Tensor, tokens: int) -> Tensor:
    """The int8 weight of `weight` [out, in], packed by oneDNN for that many tokens."""
    return torch.ops.onednn.qlinear_prepack(quantized(weight).contiguous(), [tokens, weight.shape[1]])


def token_scale(x: Tensor) -> Tensor:
    """float32 [..., 1] of x [..., in]."""
    return x.abs().amax(-1, keepdim=True).float().mul(1 / MOST).clamp(min=SMALLEST)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, rounded to int8."""
    return x.float().mul(scale.reciprocal()).round().to(torch.int8)


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """x int8 [..., in] by a packed weight [out, in] and its scales [out]: without those of x, in `dtype`."""
    y = torch.ops.onednn.qlinear_pointwise(
        as_rows(x), 1.0, 0, weight, scales, _zeros(len(scales)), None, 1.0, 0, dtype, "none", [], ""
    )
    return as_tokens(y, x)


def scaled(y: Tensor, scale: Tensor) -> Tensor:
    """y * scale in the type of y."""
    return y.float().mul(scale).to(y.dtype)


@functools.cache
def exact() -> bool:
    """Whether products are exact here: without VNNI, sums of two may be cut at 2^15."""
    if not torch.backends.mkldnn.is_available():
        return False
    x = torch.full((16, 64), MOST, dtype=torch.int8)
    y = int8_linear(x, torch.ops.onednn.qlinear_prepack(x, list(x.shape)), torch.ones(len(x)), torch.float32)
    return bool((y == 64 * MOST**2).all())


@functools.cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)
