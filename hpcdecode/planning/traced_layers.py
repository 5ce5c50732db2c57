"""What a plan takes from a model without weights: the shapes of its layers as jobs trace them, and its embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdecode.attention.shapes import MixerShape
from hpcdecode.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel


def traced_layers(directory: str) -> tuple[tuple[MixerShape, ...], int | None]:
    """Return the shapes of a model's layers, as a job has them, and the most tokens of a sequence."""
    import torch

    from hpcdecode.model.frontend.absorb import absorb
    from hpcdecode.model.frontend.cache import cached_trace
    from hpcdecode.model.frontend.choose import join_indexers
    from hpcdecode.model.frontend.gguf.folder import model_folder
    from hpcdecode.model.run.mixers import layer_shapes

    trace = cached_trace(model_folder(directory), torch.bfloat16, announce=True)
    absorb(trace)
    trace = join_indexers(trace)
    return layer_shapes(trace), trace.facts.max_positions


def embedding_weights(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the weights of the logits, and of the embedding; they are one tensor if they are tied."""
    from torch import Tensor

    output = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    embedding = model.get_input_embeddings().weight
    assert isinstance(output, Tensor) and isinstance(embedding, Tensor), "embeddings have a weight"
    return output, embedding


def without_weights(directory: str, config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, where weights have shapes only."""
    import torch

    from hpcdecode.model.frontend.architectures import build

    try:
        with torch.device("meta"):
            return build(config, torch.bfloat16)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{directory}: expected the config.json of a decoder: {error}") from None
