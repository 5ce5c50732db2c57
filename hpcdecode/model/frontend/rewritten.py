"""A model of transformers while it is traced: what cannot be traced as it is means what this package has for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcdecode.model.frontend.compressors import COMPRESSORS
from hpcdecode.model.frontend.expert_loops import EXPERT_LOOPS
from hpcdecode.model.frontend.indexers import tracing_indexers
from hpcdecode.model.frontend.inkling import INKLING
from hpcdecode.model.frontend.llama4 import tracing_llama4
from hpcdecode.model.frontend.ngrams import tracing_ngrams
from hpcdecode.model.frontend.own_attentions import tracing_own_attentions
from hpcdecode.model.frontend.replaced_names import replaced_methods
from hpcdecode.model.frontend.rotary import RECOMPOSITIONS
from hpcdecode.model.frontend.scans import recurrences

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def rewritten(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let `model`, of transformers, be one that can be traced inside the block; dtype: of its activations."""
    forwards = replaced_methods(model.modules(), {**EXPERT_LOOPS, **COMPRESSORS, **INKLING})
    grids = replaced_methods(model.modules(), RECOMPOSITIONS, "recomposition_frequencies")
    ngrams = tracing_ngrams(model, dtype)
    own = tracing_own_attentions(model)
    with tracing_indexers(model), tracing_llama4(model), own, forwards, grids, ngrams, recurrences(model, dtype):
        yield
