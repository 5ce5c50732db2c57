"""How large a decoder is: its weights, its KV cache and what it sends, from its config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hpcdecode.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

ELEMENT_BYTES = 2  # e: of weights and activations in bfloat16
_STATES = ("state_size", "ssm_state_size", "mamba_d_state")  # in configs of models with recurrent layers


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
        hidden: Columns of the residual, which sums and stages carry; 0 for those of q.
        kv_heads: KV heads of a layer, which tensor parallelism deals out; 0 if they are not known.
        expert_weights: Those of N in routed experts.
        experts: E, routed experts of a layer; 0 for none.
        experts_per_token: k, of these that a token goes to.
    """

    layers: int
    layer_weights: int
    head_weights: int
    q_columns: int
    k_columns: int
    v_columns: int
    max_positions: int | None
    hidden: int = 0
    kv_heads: int = 0
    expert_weights: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def from_directory(cls, directory: str) -> ModelSize:
        """Read a model directory's config.json; weights are not needed.

        Raises:
            UserError: If config.json is not that of a decoder that is known, or layers keep recurrent states.
        """
        from hpcdecode.model.frontend.architectures import decoder_of, text_of
        from hpcdecode.model.frontend.config import read_config

        whole = read_config(directory)
        config, model = text_of(whole), _without_weights(directory, whole)
        _refuse_states(directory, config)
        output, embedding = _embedding_weights(model)
        named = {name: p for name, p in decoder_of(model).named_parameters() if p is not output}
        parameters = sum(p.numel() for p in [*named.values(), output])
        own_head = 0 if output is embedding else output.numel()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dims = _head_dims(config)
        experts = {name: p for name, p in named.items() if ".experts." in name}
        return cls(
            layers=config.num_hidden_layers,
            layer_weights=parameters - embedding.numel() - own_head,
            head_weights=output.numel(),
            q_columns=heads * dims.k,
            k_columns=kv_heads * dims.k,
            v_columns=kv_heads * dims.v,
            max_positions=getattr(config, "max_position_embeddings", None),
            hidden=config.hidden_size,
            kv_heads=kv_heads,
            expert_weights=sum(p.numel() for p in experts.values()),
            experts=max((len(p) for p in experts.values()), default=0),
            experts_per_token=getattr(config, "num_experts_per_tok", None) or 0,
        )

    def kv_bytes_per_token(self, element_bytes: float = ELEMENT_BYTES) -> float:
        """Return the bytes of K and V of a token, all layers: L * (k + v columns) * bytes of an element."""
        return self.layers * (self.k_columns + self.v_columns) * element_bytes

    @property
    def weight_bytes(self) -> float:
        """Return e * (N + weights of the logits)."""
        return ELEMENT_BYTES * (self.layer_weights + self.head_weights)

    @property
    def o_columns(self) -> float:
        """Return the columns of o in a layer: as many heads as q has, of the dimension of v."""
        return self.q_columns * self.v_columns / self.k_columns

    @property
    def residual_columns(self) -> int:
        """Return the columns of the residual."""
        return self.hidden or self.q_columns

    @property
    def wire_bytes_per_token(self) -> float:
        """Return the bytes of q, k, v there and o back, all layers: L * (2 + 2/G)*e*d (Lamina: 4*e*d*L for G = 1)."""
        return ELEMENT_BYTES * self.layers * (self.q_columns + self.k_columns + self.v_columns + self.o_columns)

    def active_weights(self) -> float:
        """Return the weights of the layers that a token is multiplied by: k/E of those of the experts."""
        if not self.experts:
            return self.layer_weights
        return self.layer_weights - (1 - self.experts_per_token / self.experts) * self.expert_weights

    def read_weights(self, tokens: float) -> float:
        """Return the weights of the layers that are read for `tokens` tokens.

        Of E experts they touch E * (1 - (1 - k/E)^tokens), if each token takes any k of them as likely.
        """
        if not self.experts:
            return self.layer_weights
        untouched: float = (1 - self.experts_per_token / self.experts) ** tokens
        return self.layer_weights - untouched * self.expert_weights


def _refuse_states(directory: str, config: PretrainedConfig) -> None:
    """Raise UserError if layers keep recurrent states."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds & {"linear_attention", "conv", "hybrid"} or any(hasattr(config, name) for name in _STATES):
        raise UserError(
            f"{directory}: expected a model all of whose layers attend, got {config.model_type!r}; plans do not count "
            "recurrent states, so start the job with --layout and --batch of your own"
        )


class _HeadDims(NamedTuple):
    """Columns of a head of k, and of one of v."""

    k: int
    v: int


def _head_dims(config: PretrainedConfig) -> _HeadDims:
    """Return the dimensions of heads as they are traced; latent attention (DeepSeek) is, with every head."""
    if (latent := getattr(config, "qk_nope_head_dim", None)) is not None:
        return _HeadDims(latent + config.qk_rope_head_dim, config.v_head_dim)
    own = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _HeadDims(own, own)


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

    from hpcdecode.model.frontend.architectures import build

    try:
        with torch.device("meta"):
            return build(config, torch.bfloat16)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{directory}: expected the config.json of a decoder: {error}") from None
