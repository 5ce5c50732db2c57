"""Attention of prompts by torch, on the device where their K and V lie: flash kernels where a layer allows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hpcdecode.attention.base import LayerShape
from hpcdecode.attention.reference import attend_one

_SCORES = 1 << 26  # bytes of scores that are held at once where they are made one by one


class TorchPrompts:
    """As `attention.PromptAttention`, for tensors of `dtype` on `device`. Packed: rows [k | v], token after token."""

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device):
        self.shapes, self.dtype, self.device = tuple(layers), dtype, device

    def tokens_in(self, nbytes: int) -> int:
        return nbytes // sum(self.packed_bytes(layer, 1) for layer in range(len(self.shapes)))

    def packed_bytes(self, layer: int, tokens: int) -> int:
        return tokens * self.shapes[layer].kv_columns * self.dtype.itemsize

    def attend(
        self,
        layer: int,
        packed: list[Tensor],
        starts: Any,
        counts: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        skipped_queries: Any = None,
    ) -> None:
        shape, first = self.shapes[layer], 0
        keys = shape.kv_heads * shape.k_dim
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
            heads = (
                q[read].reshape(count - skipped, shape.q_heads, shape.k_dim),
                held[:, :keys].unflatten(1, (shape.kv_heads, shape.k_dim)),
                held[:, keys:].unflatten(1, (shape.kv_heads, shape.v_dim)),
            )
            plain = shape.softcap is None and not shape.sinks and (shape.window is None or shape.window >= end)
            out[read] = _by_flash(*heads, shape) if plain else _by_scores(*heads, shape, sinks)


def _by_flash(q: Tensor, k: Tensor, v: Tensor, shape: LayerShape) -> Tensor:
    """Of the last n positions. q [n, q_heads, k_dim], k and v [L, kv_heads, dim]; returns [n, q_heads * v_dim]."""
    from torch.nn.attention.bias import causal_lower_right  # with torch's compiler: a second, 75 MiB

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    bias = causal_lower_right(q.shape[2], k.shape[2])
    o = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=shape.scale, enable_gqa=shape.group > 1)
    return o[0].transpose(0, 1).reshape(q.shape[2], shape.out_columns)


def _by_scores(q: Tensor, k: Tensor, v: Tensor, shape: LayerShape, sinks: Tensor | None) -> Tensor:
    """The same, some queries at a time over the positions that they see, in float32."""
    n, length = len(q), len(k)
    some = max(_SCORES // (4 * shape.q_heads * length), 1)
    parts = []
    for begin in range(0, n, some):
        part = q[begin : begin + some]
        end = length - n + begin + len(part)
        low = 0 if shape.window is None else max(end - len(part) + 1 - shape.window, 0)
        parts.append(attend_one(part.float(), k[low:end].float(), v[low:end].float(), shape, sinks).flatten(1))
    return torch.cat(parts).to(q.dtype)
