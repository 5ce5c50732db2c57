"""Recurrent layers to measure: shapes of known models, random weights and rows, and exact answers."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.attention.shapes import RecurrentShape, RecurrentWeights

KNOWN = {
    "gated-deltanet": RecurrentShape(32, 16, 128, 128, 4, True, True, True, 128**-0.5, 1, True),  # Qwen3-Next
    "kda": RecurrentShape(32, 32, 128, 128, 4, True, True, True, 128**-0.5, 128, True),  # Kimi-Linear
    "mamba2": RecurrentShape(128, 1, 128, 64, 4, True, has_beta=True),  # Granite 4 H Small
    "mamba1": RecurrentShape(8192, 1, 16, 1, decay_dim=16, has_beta=True, has_rate=True),  # Jamba
}


def flops(layer: RecurrentShape) -> int:
    """Return the FLOP of a token's pass through the states, exp and convolution aside.

    An element is decayed and added to (3), and takes part in one product with q (2), and one with k for the delta
    rule (2).
    """
    return (7 if layer.delta else 5) * layer.heads * layer.k_dim * layer.v_dim


def random_numbers(layer: RecurrentShape, seed: int = 0) -> RecurrentWeights:
    """Return random weights."""
    g = torch.Generator().manual_seed(seed)
    taps = torch.randn(layer.channels, layer.taps, generator=g) / max(layer.taps, 1) ** 0.5 if layer.taps else None
    bias = torch.randn(layer.channels, generator=g) / 4 if layer.taps > 2 else None
    rate = -torch.rand(layer.heads * layer.decay_dim, generator=g) if layer.has_rate else None
    skip = torch.randn(layer.heads, generator=g) if layer.k_dim and not layer.delta else None
    return RecurrentWeights(taps, bias, rate, skip)


def random_rows(layer: RecurrentShape, tokens: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return rows [tokens, row_columns] of random tokens, with decays below 1 and betas from 0 to 1."""
    g = torch.Generator().manual_seed(seed)
    channels = torch.randn(tokens, layer.channels, generator=g).to(dtype)
    decay = -torch.rand(tokens, layer.widths[3], generator=g)
    beta = torch.rand(tokens, layer.heads if layer.has_beta else 0, generator=g)
    return torch.cat([channels, decay.view(dtype), beta.view(dtype)], dim=1)


def exact(layer: RecurrentShape, numbers: RecurrentWeights, rows: Tensor) -> Tensor:
    """Return the output [tokens, heads * v_dim] of one sequence in float64, from RecurrentShape's definition."""
    tokens, heads, group = len(rows), layer.heads, layer.heads // layer.k_heads
    decays = layer.widths[3]
    rest = rows[:, layer.channels :].contiguous().view(torch.float32).double()
    x = _convolved(layer, numbers, rows[:, : layer.channels].double())
    if layer.k_dim == 0:
        return x
    k_columns = layer.k_heads * layer.k_dim
    q, k, v = x.split([k_columns, k_columns, layer.out_columns], dim=1)
    q, k = (y.view(tokens, layer.k_heads, layer.k_dim) for y in (q, k))
    if layer.normalised:
        q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = q.repeat_interleave(group, 1) * layer.scale, k.repeat_interleave(group, 1)
    v = v.view(tokens, heads, layer.v_dim)
    beta = rest[:, decays:] if layer.has_beta else x.new_ones(tokens, heads)
    if numbers.rate is not None:
        log_decay = beta[:, :, None] * numbers.rate.double().view(heads, -1)
    else:
        log_decay = rest[:, :decays].reshape(tokens, heads, -1)
    state, out = x.new_zeros(heads, layer.k_dim, layer.v_dim), []
    for t in range(tokens):
        state = state * log_decay[t].exp()[:, :, None]
        e = v[t] - torch.einsum("hkv,hk->hv", state, k[t]) if layer.delta else v[t]
        state = state + k[t][:, :, None] * (e * beta[t][:, None])[:, None]
        y = torch.einsum("hkv,hk->hv", state, q[t])
        out.append(y if numbers.skip is None else y + numbers.skip.double()[:, None] * v[t])
    return torch.stack(out).flatten(1)


def _convolved(layer: RecurrentShape, numbers: RecurrentWeights, x: Tensor) -> Tensor:
    """Return the channels [tokens, channels] after the convolution."""
    if numbers.convolution is None:
        return x
    full = torch.cat([x.new_zeros(layer.taps - 1, layer.channels), x])
    y = (full.unfold(0, layer.taps, 1) * numbers.convolution.double()).sum(-1)
    y = y if numbers.bias is None else y + numbers.bias.double()
    return torch.nn.functional.silu(y) if layer.silu else y
