"""Attention over rows of K and V by torch's operations, on any device. Sums are float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from hpcdecode.attention.shapes import LayerShape, PositionBias
from hpcdecode.attention.torch_reads import Wave
from hpcdecode.attention.torch_rows import RowStore

_LOWEST = torch.finfo(torch.float32).min


class Heads(NamedTuple):
    """What a layer's heads attend over.

    Attributes:
        shape: Shape of the layer.
        k: K, and V if the layer is latent.
        v: V, or None.
        dtype: That products are made in: float32 or bfloat16.
    """

    shape: LayerShape
    k: RowStore
    v: RowStore | None
    dtype: torch.dtype

    def by_head(self) -> Heads:
        """Return the same with rows of one KV head each, as `RowStore.by_head`."""
        one = replace(self.shape, kv_heads=1, q_heads=self.shape.group)
        return Heads(one, self.k.by_head(), None if self.v is None else self.v.by_head(), self.dtype)


class PartialAttention(NamedTuple):
    """Attention over some positions, float32.

    Attributes:
        tops: Largest score, [n, q_heads].
        sums: Of exp(score - top), [n, q_heads].
        values: Of the same times V, [n, q_heads, v_dim].
    """

    tops: Tensor
    sums: Tensor
    values: Tensor


class Biases(NamedTuple):
    """What is added to the scores of rows, by distance.

    Attributes:
        shape: Whose profiles these are.
        by_distance: Of each distance that has one, float32 [n, q_heads, extent]; without end that of 1 alone.
    """

    shape: PositionBias
    by_distance: Tensor

    def of(self, rows: Tensor, distances: Tensor) -> Tensor:
        """Return biases, float32 [items, q_heads, tokens], of items of rows, int32 [items], at distances of tokens."""
        own, extent = self.by_distance.index_select(0, rows), self.shape.extent
        if not extent:
            return own * distances[:, None]
        at = distances.clamp(0, extent - 1).long()[:, None].expand(-1, own.shape[1], -1)
        return own.gather(2, at).masked_fill_((distances >= extent)[:, None], 0.0)


def biases_of(mixes: Tensor, shape: LayerShape, profiles: Tensor) -> Biases:
    """Return the biases of rows.

    Args:
        mixes: The numbers that mix profiles, [n, q_heads * dim].
        shape: Shape of a layer with biases.
        profiles: float32 [dim, extent] on the device.
    """
    assert shape.bias is not None, "expected a layer with biases"
    own = mixes.float().unflatten(1, (shape.q_heads, shape.bias.dim))
    if not shape.bias.extent:
        return Biases(shape.bias, -own.sum(2, keepdim=True))
    return Biases(shape.bias, torch.bmm(own, profiles.expand(len(own), -1, -1)))


def attend_wave(heads: Heads, q: Tensor, wave: Wave, sinks: Tensor | None, biases: Biases | None = None) -> Tensor:
    """Return the attention of the rows of a wave, float32 [n, q_heads, v_dim].

    Args:
        heads: K and V.
        q: Queries of the wave's rows, [n, q_heads, k_dim], in the dtype of products.
        wave: What they read.
        sinks: float32 [q_heads], or [n, q_heads] of the rows' own, or None for a layer without.
        biases: Of the rows, or None.
    """
    part = _nothing(wave.items + 1, heads.shape, q.device)
    for begin in range(0, wave.items, wave.group):
        _attend_group(heads, q, wave, slice(begin, begin + wave.group), part, biases)
    for level in wave.levels:
        part = _merged(part, level)
    tops, sums, values = (x[:-1] for x in part)
    if sinks is not None:
        above = torch.maximum(tops, sinks)
        fade = (tops - above).exp_()
        sums, values = sums * fade + (sinks - above).exp_(), values * fade[..., None]
    return values / sums[..., None]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of n matrices, float32 [n, i, k], of a [n, i, j] and b [n, j, k], float32 or bfloat16."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.device.type == "cpu":  # which has no products of bfloat16 with results in float32
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b, out_dtype=torch.float32)


def _nothing(n: int, shape: LayerShape, device: torch.device) -> PartialAttention:
    """Return memory for n results, the last of which is that over no positions."""
    sizes = (n, shape.q_heads), (n, shape.q_heads), (n, shape.q_heads, shape.v_dim)
    made = PartialAttention(*(torch.empty(size, dtype=torch.float32, device=device) for size in sizes))
    made.tops[-1], made.sums[-1], made.values[-1] = float("-inf"), 0.0, 0.0
    return made


def _attend_group(
    heads: Heads, q: Tensor, wave: Wave, own: slice, part: PartialAttention, biases: Biases | None
) -> None:
    """Attend from the items `own`, to their results."""
    shape, places = heads.shape, wave.places[own]
    items, tokens = places.shape
    queries = q.index_select(0, wave.queries[own]).reshape(items * shape.kv_heads, shape.group, shape.k_dim)
    k = _by_head(heads.k, places, heads.dtype)
    scores = product(queries, k.transpose(1, 2)).mul_(shape.scale)
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    scores = scores.view(items, shape.q_heads, tokens)
    if biases is not None and wave.distances is not None:
        scores += biases.of(wave.queries[own], wave.distances[own])
    scores.masked_fill_(wave.hidden[own, None], float("-inf"))
    tops = scores.amax(-1)
    weights = scores.sub_(tops[..., None]).exp_().to(heads.dtype)
    v = k[..., : shape.v_dim] if heads.v is None else _by_head(heads.v, places, heads.dtype)
    part.tops[own], part.sums[own] = tops, weights.sum(-1, dtype=torch.float32)
    weights = weights.view(items * shape.kv_heads, shape.group, tokens)
    part.values[own] = product(weights, v).view(items, shape.q_heads, shape.v_dim)


def _by_head(rows: RowStore, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of items, [items * heads, tokens, dim]; a view of what is read if there is one head."""
    read = rows.read(places.flatten(), dtype)
    by_head: Tensor = read.unflatten(0, places.shape).transpose(1, 2).flatten(0, 1)
    return by_head


def _merged(part: PartialAttention, children: Tensor) -> PartialAttention:
    """Return the results of which each merges some, in their order; children: int32 [branches, n]."""
    if len(children) == 1:
        return PartialAttention(*(x.index_select(0, children[0]) for x in part))
    every = part.tops.index_select(0, children.flatten()).unflatten(0, children.shape)
    tops = every.amax(0)
    weights = (every - tops.clamp_min(_LOWEST)).exp_()
    first = children[0]
    sums = part.sums.index_select(0, first).mul_(weights[0])
    values = part.values.index_select(0, first).mul_(weights[0, ..., None])
    for weight, child in zip(weights[1:], children[1:], strict=True):
        sums.addcmul_(part.sums.index_select(0, child), weight)
        values.addcmul_(part.values.index_select(0, child), weight[..., None])
    return PartialAttention(tops, sums, values)
