"""Recurrent layers to measure: shapes of known models, random weights and rows, and exact answers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode._attn_cpu import RecurrentShape


class StatefulLayer(NamedTuple):
    """A recurrent layer, with the fields of RecurrentShape."""

    heads: int
    k_heads: int
    k_dim: int
    v_dim: int
    taps: int = 0
    silu: bool = False
    delta: bool = False
    normalised: bool = False
    scale: float = 1.0
    decay_dim: int = 1
    has_beta: bool = False
    has_rate: bool = False

    @property
    def native(self) -> RecurrentShape:
        """Return the shape for native code."""
        return RecurrentShape(*self)

    @property
    def channels(self) -> int:
        """Return the columns of q, k and v."""
        return 2 * self.k_heads * self.k_dim + self.heads * self.v_dim

    @property
    def decays(self) -> int:
        """Return the log decays of a row."""
        return 0 if self.has_rate or self.k_dim == 0 else self.heads * self.decay_dim

    @property
    def out_columns(self) -> int:
        """Return the columns of the output."""
        return self.heads * self.v_dim

    @property
    def flops(self) -> int:
        """Return the FLOP of a token's pass through the states, exp and convolution aside.

        An element is decayed and added to (3), and takes part in one product with q (2), and one with k for the delta
        rule (2).
        """
        return (7 if self.delta else 5) * self.heads * self.k_dim * self.v_dim


KNOWN = {
    "gated-deltanet": StatefulLayer(32, 16, 128, 128, 4, True, True, True, 128**-0.5, 1, True),  # Qwen3-Next
    "kda": StatefulLayer(32, 32, 128, 128, 4, True, True, True, 128**-0.5, 128, True),  # Kimi-Linear
    "mamba2": StatefulLayer(128, 1, 128, 64, 4, True, has_beta=True),  # Granite 4 H Small
    "mamba1": StatefulLayer(8192, 1, 16, 1, decay_dim=16, has_beta=True, has_rate=True),  # Jamba
}


class LayerNumbers(NamedTuple):
    """The weights of a layer, as StateStore takes them."""

    conv_weight: Tensor | None
    conv_bias: Tensor | None
    rate: Tensor | None
    skip: Tensor | None


def random_numbers(layer: StatefulLayer, seed: int = 0) -> LayerNumbers:
    """Return random weights."""
    g = torch.Generator().manual_seed(seed)
    taps = torch.randn(layer.channels, layer.taps, generator=g) / max(layer.taps, 1) ** 0.5 if layer.taps else None
    bias = torch.randn(layer.channels, generator=g) / 4 if layer.taps > 2 else None
    rate = -torch.rand(layer.heads * layer.decay_dim, generator=g) if layer.has_rate else None
    skip = torch.randn(layer.heads, generator=g) if layer.k_dim and not layer.delta else None
    return LayerNumbers(taps, bias, rate, skip)


def random_rows(layer: StatefulLayer, tokens: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return rows [tokens, row_columns] of random tokens, with decays below 1 and betas from 0 to 1."""
    g = torch.Generator().manual_seed(seed)
    channels = torch.randn(tokens, layer.channels, generator=g).to(dtype)
    decay = -torch.rand(tokens, layer.decays, generator=g)
    beta = torch.rand(tokens, layer.heads if layer.has_beta else 0, generator=g)
    return torch.cat([channels, decay.view(dtype), beta.view(dtype)], dim=1)


def exact(layer: StatefulLayer, numbers: LayerNumbers, rows: Tensor) -> Tensor:
    """Return the output [tokens, heads * v_dim] of one sequence in float64, from RecurrentShape's definition."""
    tokens, heads, group = len(rows), layer.heads, layer.heads // layer.k_heads
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
    beta = rest[:, layer.decays :] if layer.has_beta else x.new_ones(tokens, heads)
    if numbers.rate is not None:
        log_decay = beta[:, :, None] * numbers.rate.double().view(heads, -1)
    else:
        log_decay = rest[:, : layer.decays].reshape(tokens, heads, -1)
    state, out = x.new_zeros(heads, layer.k_dim, layer.v_dim), []
    for t in range(tokens):
        state = state * log_decay[t].exp()[:, :, None]
        e = v[t] - torch.einsum("hkv,hk->hv", state, k[t]) if layer.delta else v[t]
        state = state + k[t][:, :, None] * (e * beta[t][:, None])[:, None]
        y = torch.einsum("hkv,hk->hv", state, q[t])
        out.append(y if numbers.skip is None else y + numbers.skip.double()[:, None] * v[t])
    return torch.stack(out).flatten(1)


def _convolved(layer: StatefulLayer, numbers: LayerNumbers, x: Tensor) -> Tensor:
    """Return the channels [tokens, channels] after the convolution."""
    if numbers.conv_weight is None:
        return x
    full = torch.cat([x.new_zeros(layer.taps - 1, layer.channels), x])
    y = (full.unfold(0, layer.taps, 1) * numbers.conv_weight.double()).sum(-1)
    y = y if numbers.conv_bias is None else y + numbers.conv_bias.double()
    return torch.nn.functional.silu(y) if layer.silu else y
