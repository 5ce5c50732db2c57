"""What tokens bring to the indexers of transformers: what these compute before they score earlier tokens.

Factors that all scores of a token have in common change no choice, and are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]

# Indexers of tokens, and the function of their module that rotates queries and keys.
_ROTATIONS = {
    **dict.fromkeys(("DeepseekV32Indexer", "AXK2Indexer", "HYV4Indexer", "HYV4VLIndexer"), "apply_rotary_pos_emb"),
    **dict.fromkeys(
        ("GlmMoeDsaIndexer", "Dots3NoteTextIndexer", "MistralLarge4TextIndexer"), "apply_rotary_pos_emb_interleave"
    ),
}
_ROTATES_LAST = ("HYV4Indexer", "HYV4VLIndexer")  # the last elements of a head, not the first


class IndexerRows(NamedTuple):
    """What tokens bring to an indexer.

    Attributes:
        topk: Number of tokens that it chooses.
        heads: Index heads; 0 where the choice of the layer before is taken.
        rows: Queries [T, heads * dim], head weights [T, heads] if there are no local blocks, and keys [T, dim]; nothing
            without heads.
        pool: Tokens that it chooses together, by the key of the last one, or blocks, by the largest q.k.
        local: Blocks, the last ones, that are attended to in any case; 0 for pools.
    """

    topk: int
    heads: int
    rows: tuple[torch.Tensor, ...]
    pool: int = 1
    local: int = 0


class Positions(NamedTuple):
    """Where the tokens are.

    Attributes:
        of_tokens: Their positions, int64 [T].
        rotary: Module that returns cosines and sines of positions [1, T].
    """

    of_tokens: torch.Tensor
    rotary: Callable[[torch.Tensor, torch.Tensor], Pair] | None


def _of_tokens(
    indexer: Any,
    _: Positions,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    embeddings: Pair,
    *__: object,
    **___: object,
) -> IndexerRows:
    """Return the rows of an indexer of DeepSeek-V3.2's kind.

    Args:
        indexer: Module of transformers.
        _: Positions of the tokens.
        hidden_states: Input of the attention, [1, T, hidden].
        q_resid: Latent of its queries, [1, T, rank].
        embeddings: Cosines and sines of the positions, [1, T, rope] each.
        __: The mask, and what else the models give.
        ___: The same, by name.
    """
    q = indexer.wq_b(q_resid).view(1, -1, indexer.n_heads, indexer.head_dim)
    return _rotated_rows(indexer, hidden_states, q, embeddings)


def _of_scaled_tokens(
    indexer: Any, positions: Positions, hidden_states: torch.Tensor, embeddings: Pair, *_: object, **__: object
) -> IndexerRows:
    """Return those of Mistral Large 4, whose queries are scaled by position, and not rotated in some layers."""
    q = indexer.wq_b(indexer.q_input_norm(hidden_states)).view(1, -1, indexer.n_heads, indexer.head_dim)
    q = indexer.softmax_scaling(q, positions.of_tokens[None], head_dim_first=False)
    return _rotated_rows(indexer, hidden_states, q, embeddings if indexer.use_rope else None)


def _rotated_rows(indexer: Any, hidden_states: torch.Tensor, q: torch.Tensor, embeddings: Pair | None) -> IndexerRows:
    """Return rows of index queries [1, T, heads, dim], which are rotated as the keys are."""
    import torch

    name, dtype = type(indexer).__name__, hidden_states.dtype
    k = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype)).to(dtype).unsqueeze(2)
    if embeddings is not None:
        rotate: Callable[..., Pair] = vars(sys.modules[type(indexer).__module__])[_ROTATIONS[name]]
        rope, last = indexer.qk_rope_head_dim, name in _ROTATES_LAST
        parts = [indexer.head_dim - rope, rope] if last else [rope, indexer.head_dim - rope]
        (q_first, q_rest), (k_first, k_rest) = (torch.split(x, parts, dim=-1) for x in (q, k))
        if last:
            q_rest, k_rest = rotate(q_rest, k_rest, *embeddings, unsqueeze_dim=2)
        else:
            q_first, k_first = rotate(q_first, k_first, *embeddings, unsqueeze_dim=2)
        q, k = torch.cat([q_first, q_rest], dim=-1), torch.cat([k_first, k_rest], dim=-1)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype))
    return _rows(indexer.index_topk, indexer.n_heads, (q, weights, k), dtype)


def _of_pools(
    indexer: Any, positions: Positions, hidden_states: torch.Tensor, q_resid: torch.Tensor, **_: object
) -> IndexerRows:
    """Return those of GLM-5-Next, whose keys are means over pools of tokens, weighted by the tokens' gates."""
    import torch

    pool = int(indexer.index_kpool)
    k = indexer.k_norm(indexer.wk(hidden_states))[0]
    gates = torch.nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)[0].float()
    gates = gates + indexer.index_kpool_compress_ape.float()[positions.of_tokens % pool]
    k = _mean(k, gates, pool)
    rows = indexer.wq_b(q_resid), indexer.weights_proj(hidden_states), k
    return _rows(indexer.index_topk, indexer.n_heads, rows, hidden_states.dtype, pool)


def _of_plain_pools(
    indexer: Any, positions: Positions, hidden_states: torch.Tensor, embeddings: Pair, *_: object, **__: object
) -> IndexerRows:
    """Return those of Qwen4: keys are means over pools, rotated as their first tokens; all heads count alike."""
    import torch

    rotate: Callable[..., Any] = vars(sys.modules[type(indexer).__module__])["apply_rotary_pos_emb"]
    heads, dim, pool = indexer.index_n_heads, indexer.index_head_dim, int(indexer.compress_ratio)
    q, k = indexer.index_qk_proj(hidden_states).split([heads * dim, dim], dim=-1)
    cos, sin = embeddings
    q = rotate(indexer.q_layernorm(q.unflatten(-1, (heads, dim))), cos=cos, sin=sin, unsqueeze_dim=2)
    mean = _mean(k[0], torch.zeros_like(k[0], dtype=torch.float32), pool)[None]
    first = positions.of_tokens // pool * pool
    assert positions.rotary is not None, "a model with rotated index keys has rotary embeddings"
    cos, sin = positions.rotary(hidden_states, first[None])
    key = rotate(indexer.k_layernorm(mean)[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)
    return _rows(indexer.token_budget, heads, (q, torch.ones_like(q[..., 0]), key), hidden_states.dtype, pool)


def _of_blocks(
    indexer: Any, _: Positions, hidden_states: torch.Tensor, embeddings: Pair, *__: object, **___: object
) -> IndexerRows:
    """Return those of MiniMax-M3: every index head chooses blocks, for the KV head of its number."""
    rotate: Callable[..., Pair] = vars(sys.modules[type(indexer).__module__])["apply_rotary_pos_emb"]
    heads, dim = indexer.num_heads, indexer.head_dim
    q = indexer.q_norm(indexer.q_proj(hidden_states).unflatten(-1, (heads, dim)))
    k = indexer.k_norm(indexer.k_proj(hidden_states).unflatten(-1, (1, dim)))
    cos, sin = (x[..., :dim] for x in embeddings)
    q, k = rotate(q, k, cos, sin, unsqueeze_dim=2)
    block, local = int(indexer.block_size), int(indexer.local_blocks)
    chosen = (int(indexer.topk_blocks) - local) * block
    return _rows(chosen, heads, (q, k), hidden_states.dtype, block, local)


def _mean(k: torch.Tensor, gates: torch.Tensor, pool: int) -> torch.Tensor:
    """Return the means of keys [T, dim] so far, each over the tokens of its pool."""
    import torch

    mean: torch.Tensor = torch.ops.hpcdecode.compress(k, gates, pool, False) if pool > 1 else k
    return mean


def _rows(
    topk: int, heads: int, rows: tuple[torch.Tensor, ...], dtype: torch.dtype, pool: int = 1, local: int = 0
) -> IndexerRows:
    tokens = rows[0].shape[1]
    return IndexerRows(int(topk), heads, tuple(x.reshape(tokens, -1).to(dtype) for x in rows), pool, local)


_OF_CLASSES: dict[str, Callable[..., IndexerRows]] = {
    **dict.fromkeys(_ROTATIONS, _of_tokens),
    "MistralLarge4TextIndexer": _of_scaled_tokens,
    "Glm5NextTextIndexer": _of_pools,
    "Qwen4ExpTextQSAIndexer": _of_plain_pools,
    "MiniMaxM3VLIndexer": _of_blocks,
}


def rows_of(indexer: torch.nn.Module) -> Callable[..., IndexerRows] | None:
    """Return what computes an indexer's rows, with its forward's arguments behind the positions; None if unknown."""
    found = _OF_CLASSES.get(type(indexer).__name__)
    if found is _of_tokens and getattr(indexer.config, "index_kpool", 1) > 1:
        return None
    return None if found is _of_blocks and not _has_own_blocks(indexer) else found


def _has_own_blocks(indexer: Any) -> bool:
    """Return whether every KV head has an index head, and chooses other blocks than the last ones, which all see."""
    own: bool = indexer.num_heads == indexer.config.num_key_value_heads
    return own and bool(0 < indexer.local_blocks < indexer.topk_blocks)
