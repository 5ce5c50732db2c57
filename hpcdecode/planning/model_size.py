"""How large a decoder is: its weights, its KV cache and what it sends, from its config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hpcdecode.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

ELEMENT_BYTES = 2  # e: of weights and activations in bfloat16


class ModelSize(msgspec.Struct, frozen=True):
    """Size of a decoder.

    Attributes:
        layers: L.
        layer_weights: N, weights of all layers.
        head_weights: Weights of the logits.
        q_columns: d, columns of q in a layer: heads times their dimension.
        k_columns: Columns of k in a layer, d/G.
        v_columns: Columns of v in a layer.
        max_positions: Most tokens of a sequence; None if config.json does not say.
    """

    layers: int
    layer_weights: int
    head_weights: int
    q_columns: int
    k_columns: int
    v_columns: int
    max_positions: int | None

    @classmethod
    def from_directory(cls, directory: str) -> ModelSize:
        """Read a model directory's config.json; weights are not needed.

        Raises:
            UserError: If config.json is not that of a decoder that is known.
        """
        from hpcdecode.model.frontend.config import read_config

        config = read_config(directory)
        model = _without_weights(directory, config)
        output, embedding = _embedding_weights(model)
        parameters = sum(p.numel() for p in model.parameters())
        own_head = 0 if output is embedding else output.numel()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            layers=config.num_hidden_layers,
            layer_weights=parameters - embedding.numel() - own_head,
            head_weights=output.numel(),
            q_columns=heads * head_dim,
            k_columns=kv_heads * head_dim,
            v_columns=kv_heads * head_dim,
            max_positions=getattr(config, "max_position_embeddings", None),
        )

    def kv_bytes_per_token(self, element_bytes: float = ELEMENT_BYTES) -> float:
        """Return the bytes of K and V of a token, all layers: L * (k + v columns) * bytes of an element."""
        return self.layers * (self.k_columns + self.v_columns) * element_bytes

    @property
    def weight_bytes(self) -> float:
        """Return e * (N + weights of the logits)."""
        return ELEMENT_BYTES * (self.layer_weights + self.head_weights)

    @property
    def wire_bytes_per_token(self) -> float:
        """Return the bytes of q, k, v there and o back, all layers: L * (2 + 2/G)*e*d (Lamina: 4*e*d*L for G = 1)."""
        return ELEMENT_BYTES * self.layers * (2 * self.q_columns + self.k_columns + self.v_columns)


def _embedding_weights(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the weights of the logits, and of the embedding; they are one tensor if they are tied."""
    from torch import Tensor

    output = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    embedding = model.get_input_embeddings().weight
    assert isinstance(output, Tensor) and isinstance(embedding, Tensor), "embeddings have a weight"
    return output, embedding


def _without_weights(directory: str, config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, where weights have shapes only."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
                config, trust_remote_code=False
            )
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{directory}: expected the config.json of a decoder: {error}") from None
    return model
