"""Rotary embeddings of text: fixed frequencies, and one position for time, height and width.

Frequencies that transformers changes with the longest sequence of a batch are those for the longest sequence that the
model can run, as in vLLM. So they depend on the model alone: a row's tokens are the same in any batch, and after a job
is resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIXED = "default"  # rope type of a module that keeps its frequencies
_OF_GRIDS = (  # classes that take every third frequency from the positions of another dimension
    "CohereCompassRotaryEmbedding",
    "Cosmos3EdgeTextRotaryEmbedding",
    "HYV4VLRotaryEmbedding",
    "Qwen3OmniMoeThinkerTextRotaryEmbedding",
    "Qwen3VLMoeTextRotaryEmbedding",
    "Qwen3VLTextRotaryEmbedding",
    "Qwen3_5MoeTextRotaryEmbedding",
    "Qwen3_5TextRotaryEmbedding",
    "Qwen4ExpTextRotaryEmbedding",
)


def fix_frequencies(model: PreTrainedModel) -> dict[str, Tensor]:
    """Let each rotary embedding of `model` keep its frequencies, and return those that change, by buffer.

    longrope: the long factors if the model runs sequences longer than `original_max_position_embeddings`, else the
    short ones. Dynamic NTK: those of up to `max_position_embeddings`, which no sequence exceeds.
    """
    changed: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        stated = getattr(module, "rope_type", None)
        kinds: dict[str | None, Any] = stated if isinstance(stated, dict) else {None: stated}
        for layer, kind in kinds.items():
            if kind == "longrope":
                prefix = "" if layer is None else f"{layer}_"
                changed[f"{name}.{prefix}inv_freq"] = longrope_frequencies(module.config, layer)
        if any(isinstance(kind, str) and changes(kind) for kind in kinds.values()):
            fixed = {layer: FIXED if changes(kind) else kind for layer, kind in kinds.items()}
            module.rope_type = fixed if isinstance(stated, dict) else FIXED
    return changed


def of_text(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the method `recomposition_frequencies` for text, whose positions are the same in all dimensions.

    It takes freq, [3, ..., d], and returns [..., 2 d]. That of transformers writes in place: it needs a second trace.
    """
    return lambda module, freq, *layer_type: torch.cat((freq[0], freq[0]), dim=-1)


RECOMPOSITIONS = dict.fromkeys(_OF_GRIDS, of_text)


def changes(kind: str) -> bool:
    """Return whether transformers changes the frequencies of a rope type as a model runs."""
    return "dynamic" in kind or kind == "longrope"


def longrope_frequencies(config: Any, layer: str | None) -> Tensor:
    """Return the inverse frequencies for the longest sequence of the model.

    Args:
        config: Config of the language model.
        layer: Kind of the layers that they are for, or None if all layers have one.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute: Callable[..., tuple[Tensor, float]] = ROPE_INIT_FUNCTIONS["longrope"]
    of_layer = {} if layer is None else {"layer_type": layer}
    return compute(config, torch.device("cpu"), seq_len=config.max_position_embeddings, **of_layer)[0]
