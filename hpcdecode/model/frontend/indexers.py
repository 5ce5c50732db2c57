"""Indexers of sparse attention while a model is traced.

An indexer chooses the earlier tokens, or blocks of them, to which a token attends: `index_topk` tokens in DeepSeek-V3.2
and most others, pools of so many tokens together in GLM-5-Next, `index_topk_blocks` blocks in MiniMax-M3, pools of
`indexer_budget` tokens together in Qwen4. In a sequence of at most so many tokens it chooses all of them, whatever it
computes. So the attention of such sequences is plain causal attention (`ModelFacts.max_positions`).

For longer ones indexers that are known go into the trace: `hpcdecode::attend` takes what `indexer_rows` computes, and
what attends chooses by it (`IndexerShape`). The key of a pool is a mean, kept as that of a compressor (see
`compressors.py`). Other indexers choose all tokens, and no longer sequences run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hpcdecode.model.frontend.indexer_rows import IndexerRows, Positions, rows_of
from hpcdecode.model.frontend.replaced_names import replaced_methods, replaced_names

if TYPE_CHECKING:
    import torch

TOKENS, BLOCKS = "indexed_attention", "minimax_m3_sparse"  # in a config's layer_types: kinds of layers with indexers
INDEXED = frozenset({TOKENS, BLOCKS})
_COUNTS = ("index_topk", "topk_blocks", "block_topk")  # an indexer has one of these attributes
_MASKS = ("create_causal_mask", "create_recurrent_attention_mask")  # models with indexers need more than None of them
_MASKS_BY_KIND = "LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING"  # of layers for multi-token prediction
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


class _Traced:
    """What the indexer that ran last has computed, for the attention that comes next, and the tokens' positions."""

    last: IndexerRows | None = None
    fresh = False
    positions: torch.Tensor | None = None


def trace_positions(positions: torch.Tensor) -> None:
    """Note the positions of the tokens, int64 [T], of the model that is traced now."""
    _Traced.positions = positions


def traced_positions() -> torch.Tensor:
    """Return the positions of the tokens, int64 [T], of the model that is traced now."""
    assert _Traced.positions is not None, "a model is traced with positions"
    return _Traced.positions


def take_indexer_rows(attention: object) -> IndexerRows | None:
    """Return what tokens bring to the indexer of an attention of transformers; None if no choice is made for it."""
    rows, fresh = _Traced.last, _Traced.fresh
    _Traced.fresh = False
    if rows is None or fresh:
        return rows
    return rows._replace(heads=0, rows=()) if getattr(attention, "skip_topk", False) else None


@contextlib.contextmanager
def tracing_indexers(model: torch.nn.Module) -> Iterator[None]:
    """Let attention be traced with the indexers of `model`, of transformers, inside the block.

    Where that is not known how to, they choose all tokens.
    """
    modules = list(model.modules())
    indexers = [m for m in modules if is_indexer(m)]
    traced = all(rows_of(m) is not None for m in indexers)
    forwards = replaced_methods(indexers, {type(m).__name__: _stand_in(model, m, traced) for m in indexers})
    maskers = [m for m in modules if hasattr(m, _MASK_OF)]
    masks = replaced_methods(maskers, {type(m).__name__: lambda _: _every_token for m in maskers}, _MASK_OF)
    _Traced.last, _Traced.fresh = None, False
    try:
        defining = [*indexers, model] if indexers else []
        with forwards, masks, replaced_names(defining, lambda name, _: _STAND_INS.get(name)):
            yield
    finally:
        _Traced.last = _Traced.positions = None


def _stand_in(
    model: torch.nn.Module, indexer: torch.nn.Module, traced: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what returns the forward of an indexer's class: one that notes what tokens bring to it, if it is traced.

    The attention that comes next takes it.
    """
    rows = rows_of(indexer)
    if rows is None or not traced:
        return lambda _: _every_token
    rotary = next((m for m in model.modules() if type(m).__name__.endswith("TextRotaryEmbedding")), None)

    def forward(indexer: torch.nn.Module, *args: object, **kwargs: object) -> EveryToken:
        _Traced.last, _Traced.fresh = rows(indexer, Positions(traced_positions(), rotary), *args, **kwargs), True
        return EVERY_TOKEN

    return lambda _: forward


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
    if (budget := getattr(config, "indexer_budget", None)) is not None:
        return int(budget)
    if not hasattr(config, "index_topk"):
        return None
    pool = getattr(config, "index_kpool", 1)
    return int(config.index_topk // pool * pool)


def leaves_out_newest(config: Any) -> bool:
    """Return whether the indexers of the language model `config` never choose the tokens of a pool that is not full."""
    return getattr(config, "index_kpool", 1) > 1 and not getattr(config, "index_kpool_always_select_tail", False)


def _every_token(*_: object, **__: object) -> EveryToken:
    return EVERY_TOKEN


def _without_padding(hidden_states: torch.Tensor, _: object) -> torch.Tensor:
    return hidden_states


_STAND_INS: dict[str, object] = {
    **dict.fromkeys(_MASKS, _every_token),
    _PADDING: _without_padding,
    _MASKS_BY_KIND: {"full_attention": _every_token},
}
