"""Element-wise functions by torch whose bits do not depend on an element's place in its tensor.

torch runs most of a tensor in vectors and the rest, fewer elements than two vectors, one by one, with functions that
round in another way. Several threads have such a rest each. So a tensor is filled up to whole vectors, and comes in
pieces that one thread runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.node import Target

aten = torch.ops.aten
WHOLE = 64  # elements: two vectors of 512 bits with elements of two bytes
PIECE = 1 << 15  # elements: torch runs no more than these by one thread
ROUNDING: frozenset[Target] = frozenset(
    {
        aten.cos.default,
        aten.exp.default,
        aten.gelu.default,
        aten.log.default,
        aten.log1p.default,
        aten.pow.Tensor_Scalar,
        aten.sigmoid.default,
        aten.silu.default,
        aten.sin.default,
        aten.softplus.default,
        aten.tanh.default,
    }
)


def steady(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an element-wise function of one tensor, and numbers, whose bits do not depend on an element's place."""

    def run(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        elements = x.numel()
        if x.device.type != "cpu" or (elements % WHOLE == 0 and elements <= PIECE and x.is_contiguous()):
            return function(x, *args, **kwargs)
        whole = -(-elements // WHOLE) * WHOLE
        flat = x.new_ones(whole)
        flat[:elements].view(x.shape).copy_(x)
        out = torch.cat([function(piece, *args, **kwargs) for piece in flat.split(PIECE)])
        return out[:elements].view(x.shape)

    run.__name__ = getattr(function, "__name__", "steady")
    return run
