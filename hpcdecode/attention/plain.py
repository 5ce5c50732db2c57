"""Attention, and what indexers choose, in plain torch: for tests of the native kernels, and for prompts on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.attention.shapes import IndexerShape, LayerShape


def index_dtype(kv_dtype: str) -> str:
    """Return the data type of index keys beside K and V of `kv_dtype`: of two bytes at least."""
    return kv_dtype if kv_dtype in ("float32", "float16") else "bfloat16"


def index_scores(queries: Tensor, keys: Tensor, shape: IndexerShape) -> Tensor:
    """Return the scores of L tokens for n queries, float32 [n, L].

    Args:
        queries: Index queries and head weights side by side, float32 [n, heads * (dim + 1)].
        keys: Index keys, float32 [L, dim].
        shape: Shape of the indexer.
    """
    q, weights = queries.split([shape.heads * shape.dim, shape.heads], 1)
    scores = torch.einsum("nhd,ld->nhl", q.unflatten(1, (shape.heads, shape.dim)), keys).relu()
    return torch.einsum("nhl,nh->nl", scores, weights)


def chosen_positions(queries: Tensor, keys: Tensor, shape: IndexerShape, seen: Tensor | None = None) -> Tensor:
    """Return the positions that the last n of L tokens attend to, booleans [n, L]; arguments of `index_scores`.

    Of blocks every KV head has its own, [kv_heads, n, L].

    Args:
        queries: As there.
        keys: Of tokens, or of compressed entries.
        shape: Shape of the indexer.
        seen: Which of these there are for each query, booleans [n, L]; None for the tokens up to its own.
    """
    n, length = len(queries), len(keys)
    if shape.local:
        return _chosen_blocks(queries, keys, shape)
    if shape.pool > 1:
        return _chosen_pools(queries, keys, shape)
    if seen is None:
        positions = torch.arange(length, device=keys.device)
        seen = positions[None] <= positions[length - n :, None]
    return _largest(index_scores(queries, keys, shape), seen, shape.topk)


def _largest(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return which scores, [..., n, L], are the `count` largest of those seen, booleans [n, L]; of equal the first."""
    scores = scores.masked_fill(~seen, float("-inf"))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True) & seen


def _chosen_blocks(queries: Tensor, keys: Tensor, shape: IndexerShape) -> Tensor:
    """Return the same of blocks: the last ones, and others by the largest q.k of their tokens; [heads, n, L]."""
    n, (length, block) = len(queries), (len(keys), shape.pool)
    positions = torch.arange(length, device=keys.device)
    own = positions[length - n :, None] // block
    scores = torch.einsum("nhd,ld->hnl", queries.unflatten(1, (shape.heads, shape.dim)), keys)
    scores = torch.nn.functional.pad(scores, (0, -length % block), value=float("-inf"))
    before = torch.arange(-(-length // block), device=keys.device)[None] <= own - shape.local
    blocks = _largest(scores.unflatten(-1, (-1, block)).amax(-1), before, shape.topk // block)
    local = (positions // block > own - shape.local) & (positions <= positions[length - n :, None])
    return blocks.repeat_interleave(block, -1)[..., :length] | local


def _chosen_pools(queries: Tensor, keys: Tensor, shape: IndexerShape) -> Tensor:
    """Return the same where pools of tokens are chosen: their tokens, and those behind the last whole pool."""
    n, (length, pool) = len(queries), (len(keys), shape.pool)
    one_by_one = IndexerShape(shape.topk // pool, shape.heads, shape.dim)
    whole = complete_entries(n, length, pool, keys.device)
    pools = chosen_positions(queries, keys[pool - 1 :: pool], one_by_one, whole)
    positions = torch.arange(length, device=keys.device)
    own = positions[length - n :, None]
    tail = (positions >= (own + 1) // pool * pool) & (positions <= own)
    tail[:, : pools.shape[1] * pool] |= pools.repeat_interleave(pool, 1)
    return tail


def complete_entries(n: int, length: int, rate: int, device: torch.device | None = None) -> Tensor:
    """Return which compressed entries of `length` tokens are complete for the last n, booleans [n, length // rate]."""
    ends = (torch.arange(length // rate, device=device) + 1) * rate
    return ends[None] <= torch.arange(length - n + 1, length + 1, device=device)[:, None]


def with_entries(k: Tensor, by: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """Return keys of L tokens with the E compressed entries behind them, and the entries that the last n tokens see.

    Args:
        k: Rows [key | entry | index key] of all tokens, [L, k_columns].
        by: Index queries and head weights of the last n tokens, float32 [n, q_columns - own_q_columns].
        shape: Shape of the layer.

    Returns:
        Keys [L + E, k_dim], and booleans [n, E].
    """
    rate, own = shape.compress_rate, shape.own_k_columns
    complete = k[rate - 1 :: rate]
    seen = complete_entries(len(by), len(k), rate, k.device)
    if shape.indexer:
        seen = chosen_positions(by, complete[:, 2 * own :].float(), shape.indexer, seen)
    return torch.cat([k[:, :own], complete[:, own : 2 * own]]), seen


def position_biases(mixes: Tensor, shape: LayerShape, length: int) -> Tensor:
    """Return what is added to the scores of the last n of L tokens, float32 [q_heads, n, L].

    Args:
        mixes: The numbers that mix profiles, [n, q_heads * dim].
        shape: Shape of a layer with biases.
        length: L.
    """
    assert shape.bias is not None, "expected a layer with biases"
    extent, own = shape.bias.extent, mixes.float().unflatten(1, (shape.q_heads, shape.bias.dim))
    query = torch.arange(length - len(mixes), length, device=mixes.device)[:, None]
    distance = query - torch.arange(length, device=mixes.device)
    if not extent:
        linear: Tensor = -own.sum(2).T[..., None] * distance
        return linear
    profiles = torch.from_numpy(shape.bias.values().copy()).to(mixes.device)
    by_distance = torch.einsum("nhd,de->hne", own, profiles)
    reached = (distance >= 0) & (distance < extent)
    index = distance.clamp(0, extent - 1).expand(shape.q_heads, -1, -1)
    biases: Tensor = by_distance.gather(2, index).masked_fill_(~reached, 0.0)
    return biases


def attend_rows(
    q: Tensor, rows: Tensor, by: Tensor, shape: LayerShape, sinks: Tensor | None = None, chosen: Tensor | None = None
) -> Tensor:
    """Return the attention of the last n of L tokens to what they see of all, as `attend_one`.

    Args:
        q: Queries, as there.
        rows: Rows [key | entry | index key | value] of all tokens, [L, kv_columns].
        by: What the rows of q of the last n tokens have behind the queries: numbers that mix profiles of biases, and
            sinks, or index queries and head weights, float32 [n, q_columns - own_q_columns].
        shape: Shape of the layer.
        sinks: As there.
        chosen: What was chosen, as there; None to choose by the layer's indexer, if it has one.
    """
    k, v = rows.to(q.dtype).split([shape.k_columns, shape.v_columns], 1)
    entries = None
    if shape.compress_rate:
        k, entries = with_entries(k, by, shape)
    elif shape.indexer and chosen is None:
        chosen = chosen_positions(by, rows[:, shape.own_k_columns : shape.k_columns].float(), shape.indexer)
    keys = k[:, : shape.own_k_columns].unflatten(1, (shape.kv_heads, shape.k_dim))
    values = keys[..., : shape.v_dim] if shape.latent else v.unflatten(1, (shape.kv_heads, shape.v_dim))
    biases = None if shape.bias is None else position_biases(by[:, : shape.bias_columns], shape, len(rows))
    sinks = by[:, shape.bias_columns :] if shape.row_sinks else sinks
    return attend_one(q, keys, values, shape, sinks, chosen, entries, biases)


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: LayerShape,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    entries: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of the last n of a sequence's L positions, [n, q_heads, v_dim].

    Args:
        q: Queries of the last n positions, [n, q_heads, k_dim].
        k: Keys of all positions, [L, kv_heads, k_dim], of the dtype of q. Behind them lie the compressed entries.
        v: Values as k, [L, kv_heads, v_dim], of the dtype of q.
        shape: Shape of the layer.
        sinks: float32 [q_heads], or [n, q_heads] of the queries' own, or None for a layer without sinks.
        chosen: Positions that each query may see, booleans [n, L] or [kv_heads, n, L], or None for all.
        entries: Compressed entries that each query sees, booleans [n, E], or None for a layer without.
        biases: What is added to scores, [q_heads, n, L], or None for nothing.
    """
    n, length = q.shape[0], k.shape[0] - (0 if entries is None else entries.shape[1])
    q = q.reshape(n, shape.kv_heads, shape.group, shape.k_dim)
    scores = torch.einsum("nhgd,lhd->hgnl", q, k) * shape.scale
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if biases is not None:
        scores = scores + biases.view(scores.shape)
    query = torch.arange(length - n, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    hidden = key > query
    if shape.window is not None:
        hidden |= key < (query // shape.window * shape.window if shape.chunked else query + 1 - shape.window)
    if chosen is not None:
        hidden = hidden | ~(chosen[:, None] if chosen.dim() > 2 else chosen)
    if entries is not None:
        hidden = torch.cat([hidden, ~entries], 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores).expand(n, -1).T.reshape(shape.kv_heads, shape.group, n, 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(k)]
    return torch.einsum("hgnl,lhd->nhgd", weights, v).reshape(n, shape.q_heads, shape.v_dim)
