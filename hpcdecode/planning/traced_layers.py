"""What a plan takes from a model without weights: the shapes of its layers as jobs trace them, and its embeddings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hpcdecode.attention.shapes import MixerShape, attention_shapes
from hpcdecode.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel


class TracedLayers(NamedTuple):
    """Shapes of a model's layers as R-ranks hold them; those on GPUs are empty if they are the same.

    Sequences have at most `max_positions` tokens with those on CPUs.
    """

    on_cpus: tuple[MixerShape, ...]
    on_gpus: tuple[MixerShape, ...]
    max_positions: int | None


def traced_layers(directory: str) -> TracedLayers:
    """Return the shapes of a model's layers, as a job has them."""
    import torch

    from hpcdecode.model.frontend.absorb import absorb
    from hpcdecode.model.frontend.cache import cached_trace
    from hpcdecode.model.frontend.choose import join_indexers, leave_out_indexers
    from hpcdecode.model.frontend.gguf.folder import model_folder
    from hpcdecode.model.run.mixers import layer_shapes

    traced = partial(cached_trace, model_folder(directory), torch.bfloat16, announce=True)
    trace = traced()
    absorb(trace)
    trace = join_indexers(trace)
    shapes = layer_shapes(trace)
    on_gpus: tuple[MixerShape, ...] = ()
    if any(shape.indexer and not shape.compress_rate for shape in attention_shapes(shapes)):
        plain = leave_out_indexers(traced())
        absorb(plain)
        on_gpus = layer_shapes(plain)
    return TracedLayers(shapes, on_gpus, trace.facts.max_positions)


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
