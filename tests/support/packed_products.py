"""GEMMs by packed weights, called as chains call them."""

from __future__ import annotations

import torch

from hpcdecode._ops_cpu import Chain, Op, Product, WeightForm
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.instruction import TYPES


def multiply(
    x: torch.Tensor,
    packed: torch.Tensor,
    outputs: int,
    form: WeightForm = WeightForm.plain,
    gate: Op | None = None,
    rounded: bool = False,
) -> torch.Tensor:
    """Beside rows of other memory, to see what is written there."""
    y = torch.full((len(x) + 1, outputs + 3), 7.0, dtype=x.dtype)
    kind, words = TYPES[x.dtype], x.shape[1] * x.element_size() // 4
    work = Product(kind, kind, words, outputs * (1 if gate is None else 2), packed_weights.isa(), gate, form, rounded)
    strides = [x.stride(0) * x.element_size(), 0, y.stride(0) * y.element_size()]
    places = [t.data_ptr() for t in (x, packed, y)]
    Chain([(work, [0, 1, 2])], 3, []).run(len(x), torch.get_num_threads(), places, strides)
    assert (y[-1] == 7).all() and (y[:, outputs:] == 7).all()
    return y[:-1, :outputs]
