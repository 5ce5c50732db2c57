"""Recurrent layers to measure: shapes of known models, random weights and rows, and exact answers."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor

from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights
from hpcdecode.attention.states import ReferenceStateStore

KNOWN = {
    "gated-deltanet": RecurrentShape(32, 16, 128, 128, 4, True, True, True, 128**-0.5, 1, True),  # Qwen3-Next
    "kda": RecurrentShape(32, 32, 128, 128, 4, True, True, True, 128**-0.5, 128, True),  # Kimi-Linear
    "mamba2": RecurrentShape(128, 1, 128, 64, 4, True, has_beta=True),  # Granite 4 H Small
    "mamba1": RecurrentShape(8192, 1, 16, 1, decay_dim=16, has_beta=True, has_rate=True),  # Jamba
}


def random_numbers(layer: RecurrentShape, seed: int = 0) -> RecurrentWeights:
    """Return random weights."""
    g = torch.Generator().manual_seed(seed)
    taps = torch.randn(layer.channels, layer.taps, generator=g) / max(layer.taps, 1) ** 0.5 if layer.taps else None
    bias = torch.randn(layer.channels, generator=g) / 4 if layer.taps > 2 else None
    rate = -torch.rand(layer.heads * layer.decay_dim, generator=g) if layer.has_rate else None
    skip = torch.randn(layer.heads, generator=g) if layer.k_dim and not layer.delta else None
    return RecurrentWeights(taps, bias, rate, skip)


def random_rows(layer: RecurrentShape, tokens: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return rows [tokens, row_columns] of random tokens, with decays below 1 and betas from 0 to 1, or any gates."""
    g = torch.Generator().manual_seed(seed)
    channels = torch.randn(tokens, layer.channels, generator=g).to(dtype)
    decay = -torch.rand(tokens, layer.widths[3], generator=g)
    if layer.compress_rate:
        decay = 300 * (decay + 0.5)  # gates whose weights float32 does not hold, but for the largest
    beta = torch.rand(tokens, layer.heads if layer.has_beta else 0, generator=g)
    return torch.cat([channels, decay.view(dtype), beta.view(dtype)], dim=1)


def exact(layer: RecurrentShape, numbers: RecurrentWeights, rows: Tensor) -> Tensor:
    """Return the output [tokens, heads * v_dim] of one sequence in float64, from RecurrentShape's definition."""
    own = replace(layer, element_bytes=rows.element_size())
    store = ReferenceStateStore([own], [numbers], 1, torch.float64)
    out = torch.empty(len(rows), layer.out_columns, dtype=torch.float64)
    store.extend([0], [len(rows)])
    store.run(0, [0], [len(rows)], rows, out)
    return out
