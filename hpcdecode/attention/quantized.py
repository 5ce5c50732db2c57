"""K and V as whole numbers: which data types of the KV cache have them, and what they give back.

A row of a head is rotated by a Hadamard matrix, which spreads its large elements over all of it. Then it is rounded to
`code * scale + middle`, with a bfloat16 scale and middle for each token and head. Queries are rotated as K is, and
outputs are rotated back. `native/attn_cpu/kernels/numbers.h` and `rotate.h` do the same, to the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_ROTATION = 256  # elements that are rotated together, at most


class Codes(NamedTuple):
    """The whole numbers of K or of V.

    Attributes:
        low: Smallest code.
        high: Largest code.
        middle: True if the codes span the row from its smallest to its largest element. Else they lie symmetrically
            about 0.
    """

    low: int
    high: int
    middle: bool


_INT8, _INT6, _INT4 = Codes(-127, 127, False), Codes(-32, 31, True), Codes(-8, 7, True)
CODES = {"int8": (_INT8, _INT8), "k8v4": (_INT8, _INT4), "int4": (_INT6, _INT4)}  # by kv_dtype: of K and of V


def restored(x: Tensor, codes: Codes, rotation: int | None = None) -> Tensor:
    """Return what a KV cache gives back of x [..., dim] in float32, as if it were never rotated.

    rotation: Elements that are rotated together; None for those of `rotation_of`.
    """
    return rounded(rotated(x.float(), rotation), codes, rotation)


def rounded(x: Tensor, codes: Codes, rotation: int | None = None) -> Tensor:
    """Return rotated rows [..., dim], rounded to codes and rotated back."""
    rotation = rotation or rotation_of(x.shape[-1])
    code, scale, middle = encoded(x, codes)
    return rotated(code * scale + middle, rotation) / rotation


class Encoded(NamedTuple):
    """Rotated rows as whole numbers: code * scale + middle, all float32; scale and middle are bfloat16 numbers."""

    code: Tensor
    scale: Tensor
    middle: Tensor


def encoded(x: Tensor, codes: Codes) -> Encoded:
    """Return codes [..., dim], scales [..., 1] and middles [..., 1] of rotated rows [..., dim], float32."""
    if codes.middle:
        low, high = x.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / (codes.high - codes.low)).bfloat16().float()
        middle = (low - codes.low * scale).bfloat16().float()
    else:
        scale = (x.abs().amax(dim=-1, keepdim=True) / codes.high).bfloat16().float()
        middle = torch.zeros_like(scale)
    inverse = torch.where(scale > 0, 1 / scale, 0)
    code = ((x - middle) * inverse).clamp(codes.low, codes.high)
    return Encoded(torch.where(code < 0, (code - 0.5).ceil(), (code + 0.5).floor()), scale, middle)


def rotated(x: Tensor, rotation: int | None = None) -> Tensor:
    """Return rows [..., dim] times the Hadamard matrix of entries 1 and -1, in parts of `rotation` elements."""
    half, rotation = 1, rotation or rotation_of(x.shape[-1])
    while half < rotation:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x


def rotation_of(dim: int) -> int:
    """Return the largest power of two that divides `dim`, up to 256."""
    return min(dim & -dim, _MAX_ROTATION)
