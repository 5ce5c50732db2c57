"""Attention of prompts on the S-rank, chunk by chunk. It keeps K and V only of prompts that are not complete."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcdecode.attention import LayerShape
from hpcdecode.schedule.injector import Chunk
from hpcdecode.schedule.sequence import Sequence

_TILE = 128  # queries that share one matrix of scores where the scores must be seen


class PrefillCache:
    """K and V of the prompts in prefill, and nothing else: a prompt's are dropped with its last chunk."""

    def __init__(self, shapes: Seq[LayerShape]):
        self.shapes = shapes
        self._layers: dict[Sequence, list[tuple[Tensor, Tensor]]] = {}

    @property
    def tokens(self) -> int:
        """Prompt tokens whose K and V are held."""
        return sum(s.prefilled for s in self._layers)

    def finish(self, chunks: Seq[Chunk]) -> None:
        """Forget the prompts that are complete after this step."""
        for chunk in chunks:
            if chunk.completes:
                self._layers.pop(chunk.sequence, None)

    def attend(self, layer: int, chunks: Seq[Chunk], q: Tensor, k: Tensor, v: Tensor, o: Tensor, sinks) -> None:
        """Write o [T, Hq*Dv] for the chunks' tokens q [T, Hq*Dk], k [T, Hkv*Dk], v [T, Hkv*Dv], in order."""
        shape, at = self.shapes[layer], 0
        for chunk in chunks:
            rows = slice(at, at + chunk.count)
            keys, values = self._extend(layer, chunk, k[rows], v[rows])
            attend_prompt(shape, q[rows], keys, values, chunk.start, sinks, o[rows])
            at += chunk.count

    def _extend(self, layer: int, chunk: Chunk, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the prompt's tokens so far."""
        if chunk.start == 0 and chunk.completes:
            return k, v
        layers = self._layers.setdefault(chunk.sequence, [])
        if len(layers) <= layer:
            length = chunk.sequence.prompt_length
            layers.append((k.new_empty(length, k.shape[1]), v.new_empty(length, v.shape[1])))
        keys, values = layers[layer]
        end = chunk.start + chunk.count
        keys[chunk.start : end], values[chunk.start : end] = k, v
        return keys[:end], values[:end]


def attend_prompt(
    shape: LayerShape, q: Tensor, k: Tensor, v: Tensor, start: int, sinks: Tensor | None, out: Tensor
) -> None:
    """Causal attention of the queries at positions start, start + 1, ... over k and v of positions 0, 1, ...

    q [n, Hq*Dk], k [start + n, Hkv*Dk], v [start + n, Hkv*Dv], out [n, Hq*Dv]; sinks float32 [Hq] or None.
    """
    queries = q.view(len(q), shape.q_heads, shape.k_dim).transpose(0, 1)
    keys = k.view(len(k), shape.kv_heads, shape.k_dim).transpose(0, 1)
    values = v.view(len(v), shape.kv_heads, shape.v_dim).transpose(0, 1)
    out = out.view(len(q), shape.q_heads, shape.v_dim).transpose(0, 1)
    windowed = shape.window is not None and shape.window < len(k)
    if shape.softcap is not None or sinks is not None:
        _attend_scores(shape, queries, keys, values, start, sinks, out)
        return
    mask = None if start == 0 and not windowed else _visible(len(q), len(k), start, shape.window, q.device)
    out.copy_(
        F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=shape.scale,
            enable_gqa=shape.q_heads != shape.kv_heads,
        )[0]
    )


def _visible(queries: int, keys: int, start: int, window: int | None, device: torch.device) -> Tensor:
    query = torch.arange(start, start + queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _attend_scores(
    shape: LayerShape, q: Tensor, k: Tensor, v: Tensor, start: int, sinks: Tensor | None, out: Tensor
) -> None:
    """The general case, in float32: softcap and sinks need the scores themselves."""
    group = shape.q_heads // shape.kv_heads
    keys, values = k.float(), v.float()
    for first in range(0, q.shape[1], _TILE):
        tile = q[:, first : first + _TILE].float()
        count = tile.shape[1]
        end = start + first + count
        scores = tile.reshape(shape.kv_heads, group * count, -1) @ keys[:, :end].transpose(1, 2) * shape.scale
        scores = scores.view(shape.q_heads, count, end)
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        visible = _visible(count, end, start + first, shape.window, q.device)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, count, 1)), dim=2)
        weights = torch.softmax(scores, dim=2)[..., :end]
        attended = weights.reshape(shape.kv_heads, group * count, end) @ values[:, :end]
        out[:, first : first + count] = attended.view(shape.q_heads, count, -1).to(out.dtype)
