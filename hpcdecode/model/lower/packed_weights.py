"""Weights in panels, as the products of native/ops_cpu take them: rows of 32 words, one for each of as many outputs.

First what sums begin with, for int8 then the outputs' scales, then the weights, 4 bytes of each output at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdecode._ops_cpu import Op, Product, fill_panels
from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.stage import Stage, TokenRows
from hpcdecode.system.memory import huge_zeros

PANEL = 32  # outputs
HALF = PANEL // 2
WORD = torch.int32
UNSIGNED = 128  # what makes int8 inputs unsigned numbers, as one factor of these products is


def product(x: Meta, weight: Meta, y: Meta, gate: Op | None = None) -> Stage | None:
    """x [..., in] @ weight.T, a weight [out, in] in panels; None where there is no such product here.

    gate: y is that of x @ one.T times x @ other.T, of two weights [out, in] in `gated` panels.
    """
    size = x.one_token[-1] * x.dtype.itemsize
    rows = x.token_dim is not None and x.numel_per_token == x.one_token[-1] and x.token_dim < len(x.shape) - 1
    known = x.dtype in TYPES and y.dtype in TYPES
    if not rows or not known or size % WORD.itemsize or (gate is not None and y.one_token[-1] % HALF):
        return None
    kinds, outputs = (TYPES[x.dtype], TYPES[y.dtype]), y.one_token[-1] * (1 if gate is None else 2)
    if not Product.offered(*kinds, isa(), gate):
        return None
    work = Product(*kinds, size // WORD.itemsize, outputs, isa(), gate)
    return Stage(work, [TokenRows(x), TokenRows(weight)], [TokenRows(y)])


def plain(parts: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """The panels of a weight [out, in], float32 or bfloat16, in `parts`, whose product begins with a bias [out]."""
    return in_panels(parts, torch.zeros(sum(map(len, parts))) if bias is None else bias.float())


def gated(one: Tensor, other: Tensor, biases: Sequence[Tensor] = ()) -> Tensor:
    """The panels of two weights alike, half of each panel of the one and half of the other."""
    bias = torch.stack([b.view(-1, HALF) for b in biases], 1).flatten() if biases else torch.zeros(2 * len(one))
    return in_panels([one, other], bias.float(), in_turn=HALF)


def int8(weight: Tensor, scales: Tensor) -> Tensor:
    """The panels of an int8 weight [out, in] that stands for weight * scales[:, None]."""
    return in_panels([weight], weight.sum(1, dtype=WORD) * -UNSIGNED, scales)


def rows_of(panels: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [32 * panels, in] in some `plain` panels."""
    words = panels[:, 1:].view(dtype).unflatten(-1, (PANEL, -1))
    return words.movedim(2, 1).flatten(2).flatten(0, 1)


def in_panels(parts: Sequence[Tensor], *heads: Tensor, in_turn: int | None = None) -> Tensor:
    """int32 [panels, heads + words, 32] of a weight whose rows are those of all `parts`; heads: of 4 bytes each [out].

    in_turn: rows that each part gives before the next one does (all). What is missing of the last panel is zero.
    """
    parts, heads = [p.contiguous().view(WORD) for p in parts], [h.contiguous().view(WORD) for h in heads]
    outputs, words = sum(map(len, parts)), parts[0].shape[1]
    shape = torch.Size((-(-outputs // PANEL), len(heads) + words, PANEL))
    made = huge_zeros(shape.numel() * WORD.itemsize).view(WORD).view(shape)
    rows = [(p.data_ptr(), p.stride(0) * WORD.itemsize, len(p)) for p in parts]
    places = [h.data_ptr() for h in heads]
    fill_panels(rows, places, words, in_turn or outputs, made.data_ptr(), torch.get_num_threads())
    return made
