"""Weights in panels, as the products of native/ops_cpu take them: rows of 32 words, one for each of as many outputs.

First what sums begin with, for int8 then the outputs' scales, then the weights, 4 bytes of each output at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode._ops_cpu import Product
from hpcdecode.attention import isa
from hpcdecode.memory import huge_zeros
from hpcdecode.model.instruction import TYPES
from hpcdecode.model.meta import Meta
from hpcdecode.model.stage import Rows, Stage

PANEL = 32  # outputs
WORD = torch.int32
UNSIGNED = 128  # what makes int8 inputs unsigned numbers, as one factor of these products is


def product(x: Meta, weight: Meta, y: Meta) -> Stage | None:
    """x [..., in] @ weight.T, a weight [out, in] in panels; None where there is no such product here."""
    size = x.one_token[-1] * x.dtype.itemsize
    rows = x.token_dim is not None and x.numel_per_token == x.one_token[-1] and x.token_dim < len(x.shape) - 1
    known = x.dtype in TYPES and y.dtype in TYPES
    if not rows or not known or size % WORD.itemsize or not Product.offered(TYPES[x.dtype], TYPES[y.dtype], isa()):
        return None
    work = Product(TYPES[x.dtype], TYPES[y.dtype], size // WORD.itemsize, y.one_token[-1], isa())
    return Stage(work, [Rows(x), Rows(weight)], [Rows(y)])


def plain(weight: Tensor, bias: Tensor | None) -> Tensor:
    """The panels of a weight [out, in], float32 or bfloat16, whose product begins with a bias [out]."""
    begin = torch.zeros(len(weight)) if bias is None else bias.float()
    return in_panels(weight, begin)


def int8(weight: Tensor, scales: Tensor) -> Tensor:
    """The panels of an int8 weight [out, in] that stands for weight * scales[:, None]."""
    return in_panels(weight, weight.sum(1, dtype=WORD) * -UNSIGNED, scales)


def in_panels(weight: Tensor, *heads: Tensor) -> Tensor:
    """int32 [panels, heads + words, 32]; what is missing of the last panel is zero."""
    outputs, words = len(weight), weight.contiguous().view(WORD)
    shape = torch.Size((-(-outputs // PANEL), len(heads) + words.shape[1], PANEL))
    made = huge_zeros(shape.numel() * WORD.itemsize).view(WORD).view(shape)
    whole = outputs // PANEL
    parts = ((made[:whole], slice(0, whole * PANEL)), (made[whole:, :, : outputs % PANEL], slice(whole * PANEL, None)))
    for panels, rows in parts:
        if len(panels) and panels.shape[2]:
            for i, head in enumerate(heads):
                panels[:, i] = head[rows].view(WORD).view(len(panels), -1)
            panels[:, len(heads) :] = words[rows].view(len(panels), -1, words.shape[1]).transpose(1, 2)
    return made
