"""Indexers of sparse attention (DeepSeek-V3.2, GLM-5) while a model is traced: they choose all tokens.

An indexer chooses `index_topk` of the earlier tokens, to which a token attends. In a sequence of at most so many tokens
it chooses all of them, whatever it computes. So the attention of such sequences is plain causal attention, and no
longer ones are run (`ModelFacts.max_positions`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

INDEXED = "indexed_attention"  # a kind of layer, in a config's layer_types
_MASK = "create_causal_mask"  # of transformers; models with indexers need more than None from it


class EveryToken:
    """Stands for a causal mask, for a part of it, and for indices of all tokens that it allows."""

    def __getitem__(self, _: object) -> EveryToken:
        return self


EVERY_TOKEN = EveryToken()


@contextlib.contextmanager
def choosing_all(model: torch.nn.Module) -> Iterator[None]:
    """Let the indexers of `model`, of transformers, choose all tokens inside the block."""
    indexers = [m for m in model.modules() if type(m).__name__.endswith("Indexer") and hasattr(m, "index_topk")]
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


def index_topk(config: Any) -> int | None:
    """Return the tokens that an indexer of the language model `config` chooses, or None if it has no indexers."""
    indexed = INDEXED in (getattr(config, "layer_types", None) or ())
    return int(config.index_topk) if indexed else None


def _every_token(*_: object, **__: object) -> EveryToken:
    return EVERY_TOKEN
