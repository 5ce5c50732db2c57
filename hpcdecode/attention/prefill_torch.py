"""Attention of prompts in torch, on the device of K and V, by flash kernels where a layer allows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hpcdecode.attention.base import KvCache, LayerRows
from hpcdecode.attention.plain import attend_one
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.torch_attend import product

_SCORE_BYTES = 1 << 26  # of scores held at once where no flash kernel serves


class TorchPromptAttention:
    """A `PromptAttention` in torch. K and V are packed as rows [k | v], token after token.

    Attributes:
        shapes: Shapes of the attention layers.
        dtype: Data type of all tensors.
        device: Device of all tensors.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes, self.dtype, self.device = tuple(layers), dtype, device

    def attends_beside(self, kv_cache: KvCache) -> bool:
        """Return False: a device attends for prompts alone."""
        return False

    def tokens_in(self, nbytes: int) -> int:
        """Return the tokens of a prompt whose packed K and V, of all layers, take at most `nbytes`."""
        return nbytes // max(sum(self.packed_bytes(layer, 1) for layer in range(len(self.shapes))), 1)

    def packed_bytes(self, layer: int, tokens: int) -> int:
        """Return the bytes that hold the packed K and V of `tokens` tokens of one prompt at `layer`."""
        return tokens * self.shapes[layer].kv_columns * self.dtype.itemsize

    def attend(
        self,
        layer: int,
        packed: list[Tensor],
        starts: list[int],
        counts: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        skipped_queries: list[int] | None = None,
        beside: LayerRows | None = None,
    ) -> None:
        """Pack k and v of the chunks, then attend, as `PromptAttention.attend`."""
        assert beside is None, "attend: expected rows of prompts alone"
        shape, first = self.shapes[layer], 0
        keys = shape.k_columns
        for memory, start, count, skipped in zip(
            packed, starts, counts, skipped_queries or [0] * len(packed), strict=True
        ):
            rows, end = slice(first, first + count), start + count
            first = rows.stop
            held = memory[: self.packed_bytes(layer, end)].view(self.dtype).view(end, shape.kv_columns)
            held[start:, :keys], held[start:, keys:] = k[rows], v[rows]
            if skipped == count:
                continue
            read = slice(rows.start + skipped, rows.stop)
            q_heads = q[read].reshape(count - skipped, shape.q_heads, shape.k_dim)
            k_heads = held[:, :keys].unflatten(1, (shape.kv_heads, shape.k_dim))
            if shape.latent:
                out[read] = _over_latents(q_heads, held, shape, sinks)
                continue
            v_heads = held[:, keys:].unflatten(1, (shape.kv_heads, shape.v_dim))
            plain = shape.softcap is None and not shape.sinks and (shape.window is None or shape.window >= end)
            if plain:
                out[read] = _by_flash(q_heads, k_heads, v_heads, shape)
            else:
                out[read] = _by_scores(q_heads, k_heads, v_heads, shape, sinks)


def _by_flash(q: Tensor, k: Tensor, v: Tensor, shape: LayerShape) -> Tensor:
    """Return the attention of the last n of L positions by a flash kernel, [n, q_heads * v_dim].

    Args:
        q: Queries of the last n positions, [n, q_heads, k_dim].
        k: Keys of all positions, [L, kv_heads, k_dim].
        v: Values of all positions, [L, kv_heads, v_dim].
        shape: Shape of the layer.
    """
    from torch.nn.attention.bias import causal_lower_right  # with torch's compiler: a second, 75 MiB

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    bias = causal_lower_right(q.shape[2], k.shape[2])
    o = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=shape.scale, enable_gqa=shape.group > 1)
    return o[0].transpose(0, 1).reshape(q.shape[2], shape.out_columns)


def _over_latents(q: Tensor, latents: Tensor, shape: LayerShape, sinks: Tensor | None) -> Tensor:
    """Return the same over latents [L, k_dim], for some queries of all heads at a time, which are one matrix.

    Flash kernels of torch take no heads of 576 dims, and others would repeat the one KV head for every query head.
    """
    n, length = len(q), len(latents)
    some = max(_SCORE_BYTES // (4 * shape.q_heads * length), 1)
    parts = []
    for begin in range(0, n, some):
        part = q[begin : begin + some]
        end = length - n + begin + len(part)
        low = int(shape.first_seen(np.array(end - len(part))))  # of chunks the begin of one
        seen = latents[low:end]
        scores = product(part.flatten(0, 1)[None], seen.t()[None]).view(len(part), shape.q_heads, -1)
        weights = _weights(scores.mul_(shape.scale), shape, sinks).to(latents.dtype)
        parts.append(product(weights.flatten(0, 1)[None], seen[None, :, : shape.v_dim]).view(len(part), -1))
    return torch.cat(parts).to(q.dtype)


def _weights(scores: Tensor, shape: LayerShape, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [n, q_heads, L] of the last n of L positions, float32. Chunks begin at the first."""
    n, _, length = scores.shape
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    query = torch.arange(length - n, length, device=scores.device)[:, None, None]
    key = torch.arange(length, device=scores.device)
    hidden = key > query
    if shape.window is not None:
        hidden |= key < (query // shape.window * shape.window if shape.chunked else query + 1 - shape.window)
    scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1).expand(n, -1, 1)], -1)
    return torch.softmax(scores, -1)[..., :length]


def _by_scores(q: Tensor, k: Tensor, v: Tensor, shape: LayerShape, sinks: Tensor | None) -> Tensor:
    """Return the same in float32, for some queries at a time over the positions that they see."""
    n, length = len(q), len(k)
    some = max(_SCORE_BYTES // (4 * shape.q_heads * length), 1)
    parts = []
    for begin in range(0, n, some):
        part = q[begin : begin + some]
        end = length - n + begin + len(part)
        low = int(shape.first_seen(np.array(end - len(part))))  # of chunks the begin of one
        parts.append(attend_one(part.float(), k[low:end].float(), v[low:end].float(), shape, sinks).flatten(1))
    return torch.cat(parts).to(q.dtype)
