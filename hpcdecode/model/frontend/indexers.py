"""Indexers of sparse attention while a model is traced.

An indexer chooses the earlier tokens, or blocks of them, to which a token attends: `index_topk` tokens in DeepSeek-V3.2
and GLM-5, pools of so many tokens together in GLM-5-Next, `index_topk_blocks` blocks in MiniMax-M3, blocks of
`indexer_budget` tokens together in Qwen4. In a sequence of at most so many tokens it chooses all of them, whatever it
computes. So the attention of such sequences is plain causal attention (`ModelFacts.max_positions`).

For longer ones the indexers of the first three go into the trace: `hpcdecode::attend` takes their queries, head weights
and keys, and what attends chooses by them (`IndexerShape`). The key of a pool is a mean, kept as that of a compressor
(see `compressors.py`). Other indexers choose all tokens, and no longer sequences run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdecode.model.frontend.replaced_names import replaced_methods, replaced_names

if TYPE_CHECKING:
    import torch

TOKENS, BLOCKS = "indexed_attention", "minimax_m3_sparse"  # in a config's layer_types: kinds of layers with indexers
INDEXED = frozenset({TOKENS, BLOCKS})
_COUNTS = ("index_topk", "topk_blocks", "block_topk")  # an indexer has one of these attributes
# Indexers that are traced, and the function of their module that rotates queries and keys.
ROTATIONS = {"DeepseekV32Indexer": "apply_rotary_pos_emb", "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave"}
_POOLS = "Glm5NextTextIndexer"  # traced, too
_MASKS = ("create_causal_mask", "create_recurrent_attention_mask")  # models with indexers need more than None of them
_PADDING = "apply_mask_to_padding_states"  # given the latter
_MASK_OF = "build_attention_mask_from_topk"  # method of GLM-5-Next's attention, given what its indexer chose


class EveryToken:
    """Stands for a mask, for a part of it, and for indices of all tokens that it allows."""

    def __getitem__(self, _: object) -> EveryToken:
        return self

    def __and__(self, _: object) -> EveryToken:
        return self

    def bool(self) -> EveryToken:
        """Return this mask."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of such masks."""
        import torch

        return torch.bool


EVERY_TOKEN = EveryToken()


class IndexerRows(NamedTuple):
    """What tokens bring to an indexer.

    Attributes:
        topk: Number of tokens that it chooses.
        heads: Index heads; 0 where the choice of the layer before is taken.
        rows: Queries [T, heads * dim], head weights [T, heads] and keys [T, dim]; nothing without heads.
        pool: Tokens that it chooses together, by the key of the last one.
    """

    topk: int
    heads: int
    rows: tuple[torch.Tensor, ...]
    pool: int = 1


class _Traced:
    """What the indexer that ran last has computed, for the attention that comes next, and the tokens' positions."""

    last: IndexerRows | None = None
    fresh = False
    positions: torch.Tensor | None = None


def trace_positions(positions: torch.Tensor) -> None:
    """Note the positions of the tokens, int64 [T], of the model that is traced now."""
    _Traced.positions = positions


def take_indexer_rows() -> IndexerRows | None:
    """Return what tokens bring to the indexer of the attention that runs now; None if no choice is made for it."""
    rows, fresh = _Traced.last, _Traced.fresh
    _Traced.fresh = False
    if rows is None or fresh:
        return rows
    return IndexerRows(rows.topk, 0, (), rows.pool)


@contextlib.contextmanager
def tracing_indexers(model: torch.nn.Module) -> Iterator[None]:
    """Let attention be traced with the indexers of `model`, of transformers, inside the block.

    Where that is not known how to, they choose all tokens.
    """
    modules = list(model.modules())
    indexers = [m for m in modules if is_indexer(m)]
    traced = all(map(_is_traced, indexers))
    forwards = replaced_methods(indexers, {type(m).__name__: _stand_in(type(m).__name__, traced) for m in indexers})
    maskers = [m for m in modules if hasattr(m, _MASK_OF)]
    masks = replaced_methods(maskers, {type(m).__name__: lambda _: _every_token for m in maskers}, _MASK_OF)
    _Traced.last, _Traced.fresh = None, False
    try:
        with forwards, masks, replaced_names(indexers, lambda name, _: _STAND_INS.get(name)):
            yield
    finally:
        _Traced.last = _Traced.positions = None


def _is_traced(indexer: torch.nn.Module) -> bool:
    name = type(indexer).__name__
    return name == _POOLS or (name in ROTATIONS and getattr(indexer.config, "index_kpool", 1) == 1)


def _stand_in(name: str, traced: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what returns the forward of indexers of a class."""
    forward = _every_token if not traced else _trace_pools if name == _POOLS else _trace_rows
    return lambda _: forward


def _trace_rows(
    indexer: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, position_embeddings: Any, *_: object, **__: object
) -> EveryToken:
    """Compute what tokens bring to an indexer, as its own forward does before it scores them.

    Factors that all scores have in common change no choice, and are left out.

    Args:
        indexer: Module of transformers.
        hidden_states: Input of the attention, [1, T, hidden].
        q_resid: Latent of its queries, [1, T, rank].
        position_embeddings: Cosines and sines of the positions, [1, T, rope] each.
    """
    import torch

    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotate = vars(sys.modules[type(indexer).__module__])[ROTATIONS[type(indexer).__name__]]
    heads, dim, rope = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).view(1, -1, heads, dim)
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    (q_turned, q_rest), (k_turned, k_rest) = (torch.split(x, [rope, dim - rope], dim=-1) for x in (q, k))
    q_turned, k_turned = rotate(q_turned, k_turned, *position_embeddings, unsqueeze_dim=2)
    q, k = torch.cat([q_turned, q_rest], dim=-1), torch.cat([k_turned, k_rest], dim=-1)
    weights = indexer.weights_proj(hidden_states)
    return _note(indexer, hidden_states.dtype, q, weights, k)


def _trace_pools(
    indexer: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, *_: object, **__: object
) -> EveryToken:
    """Compute the same where pools of tokens have keys: the mean of their tokens' keys, weighted by their gates."""
    import torch

    positions, pool = _Traced.positions, int(indexer.index_kpool)
    assert positions is not None, "a model is traced with positions"
    k = indexer.k_norm(indexer.wk(hidden_states))[0]
    gates = torch.nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)[0].float()
    gates = gates + indexer.index_kpool_compress_ape.float()[positions % pool]
    k = torch.ops.hpcdecode.compress(k, gates, pool, False) if pool > 1 else k
    return _note(indexer, hidden_states.dtype, indexer.wq_b(q_resid), indexer.weights_proj(hidden_states), k, pool)


def _note(
    indexer: Any, dtype: torch.dtype, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, pool: int = 1
) -> EveryToken:
    """Note what tokens bring to an indexer for the attention that comes next."""
    heads, dim = indexer.n_heads, indexer.head_dim
    rows = (x.reshape(-1, width).to(dtype) for x, width in ((q, heads * dim), (weights, heads), (k, dim)))
    _Traced.last, _Traced.fresh = IndexerRows(int(indexer.index_topk), heads, tuple(rows), pool), True
    return EVERY_TOKEN


def is_indexer(module: torch.nn.Module) -> bool:
    """Return whether a module of transformers is an indexer."""
    return type(module).__name__.endswith("Indexer") and any(hasattr(module, name) for name in _COUNTS)


def all_chosen(config: Any) -> int | None:
    """Return the tokens of which the indexers of the language model `config` choose all, or None if it has none."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if BLOCKS in kinds:
        return int(config.index_topk_blocks * config.index_block_size)
    if TOKENS not in kinds:
        return None
    if hasattr(config, "indexer_budget"):
        return int(config.indexer_budget)
    pool = getattr(config, "index_kpool", 1)
    return int(config.index_topk // pool * pool)


def leaves_out_newest(config: Any) -> bool:
    """Return whether the indexers of the language model `config` never choose the tokens of a pool that is not full."""
    return getattr(config, "index_kpool", 1) > 1 and not getattr(config, "index_kpool_always_select_tail", False)


def _every_token(*_: object, **__: object) -> EveryToken:
    return EVERY_TOKEN


def _without_padding(hidden_states: torch.Tensor, _: object) -> torch.Tensor:
    return hidden_states


_STAND_INS: dict[str, object] = {**dict.fromkeys(_MASKS, _every_token), _PADDING: _without_padding}
