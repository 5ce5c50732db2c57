"""Attention of prompts in torch, on the device of K and V, by fused kernels where a layer allows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from hpcdecode.attention.base import KvCache, LayerRows
from hpcdecode.attention.plain import chosen_positions, position_biases, with_entries
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.torch_attend import product

_SCORE_BYTES = 1 << 26  # of scores held at once where no fused kernel serves
_FLASH_DIM = 256  # most columns of a head that flash kernels take


class TorchPromptAttention:
    """A `PromptAttention` in torch. K and V are packed as rows [k | v], token after token.

    Attributes:
        shapes: Shapes of the attention layers.
        dtype: Data type of all tensors.
        device: Device of all tensors.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes, self.dtype, self.device = tuple(layers), dtype, device
        self._chosen: dict[int, Tensor] = {}  # by chunk of a call, what the indexer that ran last chose for its tokens

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
        keys, own = shape.k_columns, shape.own_k_columns
        chunks = zip(packed, starts, counts, skipped_queries or [0] * len(packed), strict=True)
        for chunk, (memory, start, count, skipped) in enumerate(chunks):
            rows, end = slice(first, first + count), start + count
            first = rows.stop
            held = memory[: self.packed_bytes(layer, end)].view(self.dtype).view(end, shape.kv_columns)
            held[start:, :keys], held[start:, keys:] = k[rows], v[rows]
            if skipped == count:
                continue
            read = slice(rows.start + skipped, rows.stop)
            if shape.chooses_from is not None and end > shape.chooses_from:
                out[read] = self._by_choice(chunk, q[read], held[:, :keys], held[:, keys:], shape, sinks)
                continue
            q_heads = q[read, : shape.own_q_columns].reshape(count - skipped, shape.q_heads, shape.k_dim)
            k_heads = held[:, :own].unflatten(1, (shape.kv_heads, shape.k_dim))
            v_heads = k_heads[..., : shape.v_dim]
            if not shape.latent:
                v_heads = held[:, keys:].unflatten(1, (shape.kv_heads, shape.v_dim))
            if _has_kernel(shape, self.dtype, end):
                out[read] = _by_kernel(q_heads, k_heads, v_heads, shape)
            else:
                mixes, own_sinks = q[read, shape.own_q_columns :].tensor_split([shape.bias_columns], 1)
                kept = own_sinks if shape.row_sinks else sinks
                out[read] = _by_scores(q_heads, k_heads, v_heads, shape, kept, mixes)

    def _by_choice(
        self, chunk: int, q: Tensor, held: Tensor, values: Tensor, shape: LayerShape, sinks: Tensor | None
    ) -> Tensor:
        """Return the attention of the last n tokens of a prompt, [n, q_heads * v_dim], to what is chosen for them.

        Args:
            chunk: Number of the chunk that they are of.
            q: Their rows of q, [n, q_columns].
            held: Rows of k of the prompt, [L, k_columns].
            values: Rows of v, [L, v_columns].
            shape: Shape of the layer.
            sinks: float32 [q_heads], or None.
        """
        n, length = len(q), len(held)
        heads = max(shape.q_heads, shape.indexer.heads if shape.indexer else 0)
        some = max(_SCORE_BYTES // (4 * heads * length), 1)
        before = self._chosen[chunk][..., -n:, :] if shape.indexer and not shape.indexer.heads else None
        keeps = shape.indexer is not None and before is None and not shape.compress_rate
        parts, chosen = [], []
        for begin in range(0, n, some):
            rows, end = q[begin : begin + some], length - n + min(begin + some, n)
            mask = None if before is None else before[..., begin : begin + some, :end]
            keys, hidden = keys_seen(rows[:, shape.own_q_columns :].float(), held[:end], shape, mask)
            k = keys.unflatten(1, (shape.kv_heads, -1)).transpose(0, 1)
            v = (
                k[..., : shape.v_dim]
                if shape.latent
                else values[:end].unflatten(1, (shape.kv_heads, -1)).transpose(0, 1)
            )
            queries = rows[:, : shape.own_q_columns].unflatten(1, (shape.kv_heads, shape.group, shape.k_dim))
            scores = product(queries.transpose(0, 1).flatten(1, 2), k.mT).mul_(shape.scale)
            scores = scores.view(shape.kv_heads, len(rows), -1, len(keys))
            weights, left = _softmax(scores, hidden[..., None, :], shape, sinks)
            o = product(weights.to(v.dtype).flatten(1, 2), v).view(shape.kv_heads, len(rows), -1, shape.v_dim)
            parts.append((o if left is None else o.mul_(left)).transpose(0, 1).flatten(1).to(q.dtype))
            if keeps:
                chosen.append(functional.pad(~hidden, (0, length - end)))
        if keeps:
            self._chosen[chunk] = torch.cat(chosen, -2)
        return torch.cat(parts)


def keys_seen(by: Tensor, held: Tensor, shape: LayerShape, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys that the last n of L tokens may see, [K, kv_heads * k_dim], and which they do not.

    These are booleans [n, K], or [kv_heads, n, K] where every KV head has a choice of its own.

    Args:
        by: Index queries and head weights of these tokens, float32 [n, q_columns - own_q_columns].
        held: Rows of k, [L, k_columns].
        shape: Shape of a layer whose tokens are chosen, or that has compressed entries.
        chosen: What the layer before chose, if this one takes it: booleans of L tokens.
    """
    n, length, own = len(by), len(held), shape.own_k_columns
    positions = torch.arange(length, device=held.device)
    query = positions[length - n :, None]
    if shape.compress_rate:
        assert shape.window is not None, "tokens beside entries have a window"
        low = int(shape.first_seen(np.array(length - n)))
        keys, entries = with_entries(held, by, shape)
        hidden = (positions[low:] > query) | (positions[low:] < query + 1 - shape.window)
        return keys[low:], torch.cat([hidden, ~entries], 1)
    if chosen is None:
        assert shape.indexer is not None, "tokens are chosen by an indexer"
        chosen = chosen_positions(by, held[:, own:].float(), shape.indexer)
    return held[:, :own], ~chosen


def _has_kernel(shape: LayerShape, dtype: torch.dtype, length: int) -> bool:
    """Return whether a fused kernel of torch attends over `length` positions without a mask in memory.

    Flash kernels take 16-bit heads of one size and groups; the others take no groups. None takes a window that moves.
    """
    if shape.latent or shape.softcap is not None or shape.sinks or shape.row_sinks or shape.bias:
        return False
    if shape.window is not None and shape.window < length and not shape.chunked:
        return False
    return shape.group == 1 or (dtype != torch.float32 and shape.k_dim == shape.v_dim <= _FLASH_DIM)


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, shape: LayerShape) -> Tensor:
    """Return the attention of the last n of L positions by fused kernels, [n, q_heads * v_dim], chunk by chunk.

    Args:
        q: Queries of the last n positions, [n, q_heads, k_dim].
        k: Keys of all positions, [L, kv_heads, k_dim].
        v: Values of all positions, [L, kv_heads, v_dim].
        shape: Shape of the layer.
    """
    first, parts = len(k) - len(q), []
    for begin, end in _chunks(first, len(k), shape):
        low = int(shape.first_seen(np.array(begin)))
        parts.append(_fused(q[begin - first : end - first], k[low:end], v[low:end], shape))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chunks(first: int, length: int, shape: LayerShape) -> Iterator[tuple[int, int]]:
    """Yield the positions from `first` to `length` in parts (begin, end) that see one chunk each."""
    chunk = shape.window if shape.chunked and shape.window is not None else length
    while first < length:
        end = min((first // chunk + 1) * chunk, length)
        yield first, end
        first = end


def _fused(q: Tensor, k: Tensor, v: Tensor, shape: LayerShape) -> Tensor:
    """Return the same of one chunk. cuDNN is left out: it plans, for tens of milliseconds, every new length of keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right  # with torch's compiler: a second, 75 MiB

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    bias = causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        o = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=shape.scale, enable_gqa=shape.group > 1)
    return o[0].transpose(0, 1).reshape(q.shape[2], shape.out_columns)


def _by_scores(q: Tensor, k: Tensor, v: Tensor, shape: LayerShape, sinks: Tensor | None, mixes: Tensor) -> Tensor:
    """Return the same by scores in float32, for some queries at a time over the positions that they see.

    Products are of numbers of the model's data type, weights too, with sums in float32. A KV head's queries are one
    matrix.

    Args:
        q: As for `_by_kernel`.
        k: As there.
        v: As there.
        shape: Shape of the layer.
        sinks: float32 [q_heads], or [n, q_heads] of the queries' own, or None.
        mixes: Numbers that mix profiles of biases, [n, bias_columns].
    """
    n, length = len(q), len(k)
    some = _queries_at_once(shape, length)
    parts = []
    for begin in range(0, n, some):
        part = q[begin : begin + some]
        end = length - n + begin + len(part)
        low = int(shape.first_seen(np.array(end - len(part))))  # of chunks the begin of one
        own = sinks[begin : begin + some] if sinks is not None and shape.row_sinks else sinks
        parts.append(_scored(part, k[low:end], v[low:end], shape, own, mixes[begin : begin + some]))
    return torch.cat(parts)


def _queries_at_once(shape: LayerShape, length: int) -> int:
    """Return how many queries have no more than `_SCORE_BYTES` of scores; n see at most n + window positions."""
    most = _SCORE_BYTES // (4 * shape.q_heads)
    some = most // length
    if shape.window is not None:
        some = max(some, (isqrt(shape.window**2 + 4 * most) - shape.window) // 2)
    return max(some, 1)


def _scored(q: Tensor, k: Tensor, v: Tensor, shape: LayerShape, sinks: Tensor | None, mixes: Tensor) -> Tensor:
    """Return the attention of the last n of L positions, [n, q_heads * v_dim]. Chunks begin at the first."""
    n, kv_heads, group = len(q), shape.kv_heads, shape.group
    queries = q.unflatten(1, (kv_heads, group)).transpose(0, 1).reshape(kv_heads, n * group, shape.k_dim)
    scores = product(queries, k.permute(1, 2, 0)).view(kv_heads, n, group, len(k)).mul_(shape.scale)
    if shape.bias is not None:
        scores += position_biases(mixes, shape, len(k)).unflatten(0, (kv_heads, group)).transpose(1, 2)
    weights, left = _weights(scores, shape, sinks)
    o = product(weights.to(v.dtype).view(kv_heads, n * group, len(v)), v.transpose(0, 1))
    o = o.view(kv_heads, n, group, shape.v_dim)
    if left is not None:
        o = o.mul_(left)
    return o.transpose(0, 1).reshape(n, shape.out_columns).to(q.dtype)


def _weights(scores: Tensor, shape: LayerShape, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the softmax of scores [kv_heads, n, group, L], float32, and what sinks leave of it, or None."""
    _, n, _, length = scores.shape
    query = torch.arange(length - n, length, device=scores.device)[:, None, None]
    key = torch.arange(length, device=scores.device)
    hidden = key > query
    if shape.window is not None:
        hidden |= key < (query // shape.window * shape.window if shape.chunked else query + 1 - shape.window)
    return _softmax(scores, hidden, shape, sinks)


def _softmax(scores: Tensor, hidden: Tensor, shape: LayerShape, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the same, where `hidden` scores do not count: booleans [n, 1, L] or [kv_heads, n, 1, L]."""
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    scores = scores.masked_fill_(hidden, float("-inf"))
    left = None
    if sinks is not None:
        own = sinks.to(scores).view(-1, shape.kv_heads, shape.group).transpose(0, 1)[..., None]
        above = scores.logsumexp(-1, keepdim=True) - own
        left = above.sigmoid_()
    return torch.softmax(scores, -1), left
