"""Recurrent layers for tests: shapes, weights, rows, and their answers by plain torch."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode._attn_cpu import RecurrentShape, StateStore

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Layer(NamedTuple):
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
        return RecurrentShape(*self)

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.heads * self.v_dim

    @property
    def decays(self) -> int:
        return 0 if self.has_rate or self.k_dim == 0 else self.heads * self.decay_dim


class Weights(NamedTuple):
    """The numbers of a layer, as StateStore takes them."""

    conv_weight: Tensor | None
    conv_bias: Tensor | None
    rate: Tensor | None
    skip: Tensor | None


LAYERS = {
    "gated_delta_net": Layer(8, 4, 128, 128, 4, True, True, True, 128**-0.5, 1, True),
    "kda": Layer(3, 3, 128, 128, 4, True, True, True, 128**-0.5, 128, True),
    "mamba2": Layer(24, 2, 128, 64, 4, True, has_beta=True),
    "mamba1": Layer(200, 1, 16, 1, decay_dim=16, has_beta=True, has_rate=True),
    "short_convolution": Layer(1, 1, 0, 100, 3),
    "retention": Layer(4, 2, 24, 40, decay_dim=24),
    "odd_delta": Layer(6, 2, 7, 5, 3, True, True, False, 0.7, 7, True, True),
    "odd_lanes": Layer(42, 3, 5, 1, 2, False, True, True, 0.5, 1, True),
}


def make_weights(layer: Layer, seed: int = 0) -> Weights:
    g = torch.Generator().manual_seed(seed)
    taps = torch.randn(layer.channels, layer.taps, generator=g) / max(layer.taps, 1) ** 0.5 if layer.taps else None
    bias = torch.randn(layer.channels, generator=g) / 4 if layer.taps > 2 else None
    rate = -torch.rand(layer.heads * layer.decay_dim, generator=g) if layer.has_rate else None
    skip = torch.randn(layer.heads, generator=g) if layer.k_dim and not layer.delta else None
    return Weights(taps, bias, rate, skip)


def make_rows(layer: Layer, tokens: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return rows [tokens, row_columns] of random tokens."""
    g = torch.Generator().manual_seed(seed)
    channels = torch.randn(tokens, layer.channels, generator=g).to(dtype)
    decay = -torch.rand(tokens, layer.decays, generator=g)
    beta = torch.rand(tokens, layer.heads if layer.has_beta else 0, generator=g)
    rows = torch.cat([channels, decay.view(dtype), beta.view(dtype)], dim=1)
    assert rows.shape[1] == layer.native.row_columns(DTYPES[dtype])
    return rows


def expected(layer: Layer, weights: Weights, rows: Tensor) -> Tensor:
    """Return the output [tokens, heads * v_dim] of one sequence in float64."""
    tokens, heads, group = len(rows), layer.heads, layer.heads // layer.k_heads
    x = rows[:, : layer.channels].double()
    rest = rows[:, layer.channels :].contiguous().view(torch.float32).double()
    if layer.taps:
        full = torch.cat([x.new_zeros(layer.taps - 1, layer.channels), x])
        x = (full.unfold(0, layer.taps, 1) * weights.conv_weight.double()).sum(-1)
        x = x if weights.conv_bias is None else x + weights.conv_bias.double()
        x = torch.nn.functional.silu(x) if layer.silu else x
    if layer.k_dim == 0:
        return x
    k_columns = layer.k_heads * layer.k_dim
    q, k, v = x.split([k_columns, k_columns, heads * layer.v_dim], dim=1)
    q, k = (y.view(tokens, layer.k_heads, layer.k_dim) for y in (q, k))
    if layer.normalised:
        q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = q.repeat_interleave(group, 1) * layer.scale, k.repeat_interleave(group, 1)
    v = v.view(tokens, heads, layer.v_dim)
    beta = rest[:, layer.decays :] if layer.has_beta else x.new_ones(tokens, heads)
    if layer.has_rate:
        log_decay = beta[:, :, None] * weights.rate.double().view(heads, -1)
    else:
        log_decay = rest[:, : layer.decays].reshape(tokens, heads, -1)
    state, out = x.new_zeros(heads, layer.k_dim, layer.v_dim), []
    for t in range(tokens):
        state = state * log_decay[t].exp()[:, :, None]
        e = v[t] - torch.einsum("hkv,hk->hv", state, k[t]) if layer.delta else v[t]
        state = state + k[t][:, :, None] * (e * beta[t][:, None])[:, None]
        y = torch.einsum("hkv,hk->hv", state, q[t])
        out.append(y if weights.skip is None else y + weights.skip.double()[:, None] * v[t])
    return torch.stack(out).flatten(1)


def open_store(
    layers: list[Layer],
    weights: list[Weights],
    dtype: torch.dtype,
    *,
    max_sequences: int = 8,
    threads: int = 1,
    nodes: tuple[int, ...] = (),
) -> StateStore:
    isa, cpus = os.environ.get("HPCDECODE_ISA", ""), sorted(os.sched_getaffinity(0))
    threads = len(nodes) or threads
    own = [cpus[i % len(cpus)] for i in range(threads)] if nodes else []
    shapes = [layer.native for layer in layers]
    return StateStore(shapes, weights, DTYPES[dtype], max_sequences, threads, own, isa, list(nodes), False, None)


def take(store: StateStore, layer: Layer, slots: list[int], rows: list[Tensor], index: int = 0) -> list[Tensor]:
    """Return the outputs of each slot's new rows at one layer; the slots have been extended."""
    counts = [len(r) for r in rows]
    out = torch.full((sum(counts), layer.heads * layer.v_dim), float("nan"), dtype=rows[0].dtype)
    store.run(index, slots, counts, torch.cat(rows), out)
    return list(out.split(counts))


def step(store: StateStore, layer: Layer, slots: list[int], rows: list[Tensor]) -> list[Tensor]:
    """Extend slots of a store of one layer by rows, and return their outputs."""
    store.extend(slots, [len(r) for r in rows])
    return take(store, layer, slots, rows)
