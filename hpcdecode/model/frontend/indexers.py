"""Indexers of sparse attention while a model is traced: they choose all tokens.

An indexer chooses the earlier tokens, or blocks of them, to which a token attends: `index_topk` tokens in DeepSeek-V3.2
and GLM-5, `index_topk_blocks` blocks in MiniMax-M3. In a sequence of at most so many tokens it chooses all of them,
whatever it computes. So the attention of such sequences is plain causal attention, and no longer ones are run
(`ModelFacts.max_positions`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TOKENS, BLOCKS = "indexed_attention", "minimax_m3_sparse"  # in a config's layer_types: kinds of layers with indexers
INDEXED = frozenset({TOKENS, BLOCKS})
_COUNTS = ("index_topk", "topk_blocks")  # an indexer has one of these attributes
_MASK = "create_causal_mask"  # of transformers; models with indexers need more than None from it


class EveryToken:
    """Stands for a causal mask, for a part of it, and for indices of all tokens that it allows."""

    def __getitem__(self, _: object) -> EveryToken:
        return self


EVERY_TOKEN = EveryToken()


@contextlib.contextmanager
def choosing_all(model: torch.nn.Module) -> Iterator[None]:
    """Let the indexers of `model`, of transformers, choose all tokens inside the block."""
    indexers = [m for m in model.modules() if is_indexer(m)]
    for indexer in indexers:
        indexer.forward = _every_token
    replaced = [
        (vars(sys.modules[name]), vars(sys.modules[name])[_MASK]) for name in {type(m).__module__ for m in indexers}
    ]
    for names, _ in replaced:
        names[_MASK] = _every_token
    try:
        yield
    finally:
        for names, function in replaced:
            names[_MASK] = function
        for indexer in indexers:
            del indexer.__dict__["forward"]


def is_indexer(module: torch.nn.Module) -> bool:
    """Return whether a module of transformers is an indexer."""
    return type(module).__name__.endswith("Indexer") and any(hasattr(module, name) for name in _COUNTS)


def all_chosen(config: Any) -> int | None:
    """Return the tokens of which the indexers of the language model `config` choose all, or None if it has none."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if BLOCKS in kinds:
        return int(config.index_topk_blocks * config.index_block_size)
    pool = getattr(config, "index_kpool", 1)
    return int(config.index_topk // pool * pool) if TOKENS in kinds else None


def leaves_out_newest(config: Any) -> bool:
    """Return whether the indexers of the language model `config` never choose the tokens of a pool that is not full."""
    return getattr(config, "index_kpool", 1) > 1 and not getattr(config, "index_kpool_always_select_tail", False)


def _every_token(*_: object, **__: object) -> EveryToken:
    return EVERY_TOKEN
