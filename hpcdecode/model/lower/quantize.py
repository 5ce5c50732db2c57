"""int8 weights: a scale for every output, and for every token of the input, which is rounded just before its GEMM.

y = (round(x / s) @ round(w / r).T) * s * r, with s = max|x| / 127 of a token and r = max|w| / 127 of an output. This is
LLM.int8 (Dettmers et al. 2022) without its outliers. Rounding and scaling are steps of the fused kernels before and
after the GEMM.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hpcdecode._ops_cpu import Product, Type
from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.rows import as_rows, as_tokens

INT8_MAX = 127
MIN_SCALE = 1e-30  # of zeros
MAX_INPUTS_PER_OUTPUT = 16  # a projection of more, such as a router of experts, stays as it is


def output_scales(weight: Tensor) -> Tensor:
    """Return the scales float32 [out] of a weight [out, in]."""
    return weight.abs().amax(1).float().div(INT8_MAX).clamp(min=MIN_SCALE)


def quantized(weight: Tensor) -> Tensor:
    """Return a weight [out, in] as int8 [out, in]."""
    rounded = weight.to(torch.float32, copy=True).div_(output_scales(weight)[:, None]).round_()
    return rounded.to(torch.int8)


def pack(weight: Tensor, tokens: int) -> Tensor:
    """Return a weight [out, in] as int8, packed by oneDNN for that many tokens."""
    return onednn_packed(quantized(weight).contiguous(), tokens)


def onednn_packed(weight: Tensor, tokens: int) -> Tensor:
    """Return an int8 weight [out, in], packed by oneDNN for that many tokens."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, [tokens, weight.shape[1]])
    return packed


def token_scale(x: Tensor) -> Tensor:
    """Return the scales float32 [..., 1] of activations [..., in]."""
    return x.abs().amax(-1, keepdim=True).float().mul(1 / INT8_MAX).clamp(min=MIN_SCALE)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, rounded to int8."""
    return x.float().mul(scale.reciprocal()).round().to(torch.int8)


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T * scales, without the scales of x.

    Args:
        x: Activations int8 [..., in].
        weight: Weight [out, in] from `pack`.
        scales: Scales float32 [out] of the weight.
        dtype: Type of the result.

    Returns:
        The result [..., out].
    """
    y = torch.ops.onednn.qlinear_pointwise(
        as_rows(x), 1.0, 0, weight, scales, _zeros(len(scales)), None, 1.0, 0, dtype, "none", [], ""
    )
    return as_tokens(y, x)


def scaled(y: Tensor, scale: Tensor) -> Tensor:
    """Return y * scale in the type of y."""
    return y.float().mul(scale).to(y.dtype)


def has_onednn() -> bool:
    """Return True if torch has oneDNN on this machine."""
    return bool(torch.backends.mkldnn.is_available())


def exact() -> bool:
    """Return True if int8 GEMMs are exact here: those of native/ops_cpu, or oneDNN's."""
    return Product.offered(Type.int8, Type.float32, isa()) or exact_onednn()


@functools.cache
def exact_onednn() -> bool:
    """Return True if oneDNN's int8 GEMMs are exact here. Without VNNI, sums of two products may be cut at 2^15."""
    if not has_onednn():
        return False
    x = torch.full((16, 64), INT8_MAX, dtype=torch.int8)
    y = int8_linear(x, onednn_packed(x, len(x)), torch.ones(len(x)), torch.float32)
    return bool((y == 64 * INT8_MAX**2).all())


@functools.cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)
