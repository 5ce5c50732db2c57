"""How large a decoder is: its weights, what R-ranks hold of its sequences and what it sends, from its config.json."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from hpcdecode.attention.shapes import LayerShape, MixerShape, recurrent_shapes, with_states_as
from hpcdecode.planning import traced_layers as traced
from hpcdecode.planning.layer_work import kv_bytes, wire_columns

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ELEMENT_BYTES = 2  # e: of activations, and of weights in bfloat16
_EXPANDED_BYTES = 2 * ELEMENT_BYTES  # that a GPU writes and reads again of a weight that is not in bfloat16


class WeightBits(msgspec.Struct, frozen=True):
    """Bits of a weight in memory, with its share of the scales, on average.

    Attributes:
        layers: Of the layers, but for routed experts.
        experts: Of routed experts.
        head: Of the logits.
        if_needed: Whether a GPU holds them so only if they do not fit in bfloat16, as with `--weights auto`.
    """

    layers: float = 8 * ELEMENT_BYTES
    experts: float = 8 * ELEMENT_BYTES
    head: float = 8 * ELEMENT_BYTES
    if_needed: bool = False


class ModelSize(msgspec.Struct, frozen=True):
    """Size of a decoder.

    Attributes:
        layer_weights: N, weights of all layers.
        head_weights: Weights of the logits.
        shapes: Of all layers at which it is cut, attentions and recurrences, as R-ranks hold them.
        max_positions: Most tokens of a sequence; None if config.json does not say.
        hidden: Columns of the residual, which sums and stages carry.
        expert_weights: Those of N in routed experts.
        experts: E, routed experts of a layer; 0 for none.
        experts_per_token: k, of these that a token goes to.
        table_weights: Weights of tables for several tokens together, of which a token takes some rows; not in N. Every
            member holds all of them.
        embedding_weights: Of the embedding, of which a token takes a row; not in N. Members of the first stage hold all
            of it.
        tied: Whether the weights of the logits are those of the embedding.
        bits: Of a weight in memory.
    """

    layer_weights: int
    head_weights: int
    shapes: tuple[MixerShape, ...]
    max_positions: int | None
    hidden: int
    expert_weights: int = 0
    experts: int = 0
    experts_per_token: int = 0
    table_weights: int = 0
    embedding_weights: int = 0
    tied: bool = False
    bits: WeightBits = WeightBits()

    @classmethod
    def alike(
        cls,
        layers: int,
        layer_weights: int,
        head_weights: int,
        q_columns: int,
        k_columns: int,
        v_columns: int,
        kv_heads: int | None = None,
    ) -> ModelSize:
        """Return the size of a decoder of layers that are alike, and attend.

        Args:
            layers: L.
            layer_weights: N.
            head_weights: Weights of the logits.
            q_columns: d, of a layer, and of the residual.
            k_columns: Of a layer, d/G.
            v_columns: Of a layer.
            kv_heads: Of a layer; None for those of 128 columns.
        """
        heads = kv_heads or max(k_columns // 128, 1)
        k_dim, v_dim = k_columns // heads, v_columns // heads
        shape = LayerShape(heads, k_dim, v_dim, q_columns // k_dim, k_dim**-0.5)
        return cls(layer_weights, head_weights, (shape,) * layers, None, q_columns)

    @classmethod
    def from_directory(cls, directory: str) -> ModelSize:
        """Read a model directory's config.json; weights are not needed. The first time the model is traced.

        The size is kept beside the trace.

        Raises:
            UserError: If config.json is not that of a decoder that can be run.
        """
        from hpcdecode.model.frontend import cache
        from hpcdecode.model.frontend.config import read_config

        config = read_config(directory)
        file = _kept_file(directory)
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.msgpack.decode(cache.read(file), type=cls)
        made = cls._measured(directory, config)
        with contextlib.suppress(OSError):
            cache.write(file, msgspec.msgpack.encode(made))
        return made

    @classmethod
    def _measured(cls, directory: str, whole: PretrainedConfig) -> ModelSize:
        """Return the size of the model of a config.json, built without weights and traced."""
        from hpcdecode.model.frontend.architectures import decoder_of, text_of
        from hpcdecode.model.frontend.ngrams import TABLE

        config, model = text_of(whole), traced.without_weights(directory, whole)
        output, embedding = traced.embedding_weights(model)
        named = {name: p for name, p in decoder_of(model).named_parameters() if p is not output}
        parameters = sum(p.numel() for p in [*named.values(), output])
        own_head = 0 if output is embedding else output.numel()
        tables = sum(p.numel() for name, p in named.items() if TABLE in name)
        experts = {name: p for name, p in named.items() if ".experts." in name}
        shapes, max_positions = traced.traced_layers(directory)
        return cls(
            layer_weights=parameters - embedding.numel() - own_head - tables,
            head_weights=output.numel(),
            shapes=shapes,
            max_positions=max_positions,
            hidden=config.hidden_size,
            expert_weights=sum(p.numel() for p in experts.values()),
            experts=max((len(p) for p in experts.values()), default=0),
            experts_per_token=_experts_per_token(config),
            table_weights=tables,
            embedding_weights=embedding.numel(),
            tied=output is embedding,
        )

    @property
    def layers(self) -> int:
        """Return L, the layers at which it is cut."""
        return len(self.shapes)

    @property
    def keeps_states(self) -> bool:
        """Return whether layers keep recurrent states."""
        return bool(recurrent_shapes(self.shapes))

    def with_states_as(self, state_dtype: str) -> ModelSize:
        """Return the size with recurrent states kept as `state_dtype`, one of STATE_DTYPES."""
        return replace(self, shapes=tuple(with_states_as(self.shapes, state_dtype)))

    def kv_bytes_per_token(self, kv_dtype: str = "bfloat16") -> float:
        """Return the stored bytes of a token, all layers that attend: K and V, or the latent."""
        return kv_bytes(self.shapes, kv_dtype)

    @property
    def layer_bytes(self) -> float:
        """Return the bytes of the weights of all layers: e * N in bfloat16."""
        return (
            self.bits.layers * (self.layer_weights - self.expert_weights) + self.bits.experts * self.expert_weights
        ) / 8

    @property
    def head_bytes(self) -> float:
        """Return the bytes of the weights of the logits."""
        return self.bits.head * self.head_weights / 8

    @property
    def table_bytes(self) -> float:
        """Return the bytes of tables."""
        return float(ELEMENT_BYTES * self.table_weights)

    def embedding_bytes(self, tp: int = 1, *, beside_head: bool = True) -> float:
        """Return the bytes of the embedding that are not those of the logits.

        Args:
            tp: Members that share the weights of the logits, while each has all of the embedding.
            beside_head: Whether both are on one member, which has what is tied and in bfloat16 once.
        """
        once = beside_head and self.tied and self.bits.head == 8 * ELEMENT_BYTES
        return ELEMENT_BYTES * self.embedding_weights - (self.head_bytes / tp if once else 0.0)

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of all weights."""
        return self.layer_bytes + self.head_bytes + self.table_bytes + self.embedding_bytes()

    @property
    def in_bfloat16(self) -> ModelSize:
        """Return the size with all weights in bfloat16."""
        return replace(self, bits=WeightBits())

    @property
    def o_columns(self) -> float:
        """Return the columns of o in the mean layer."""
        return sum(shape.out_columns for shape in self.shapes) / self.layers

    @property
    def wire_bytes_per_token(self) -> float:
        """Return the bytes of a token's rows to R-ranks and back, all layers.

        With K and V these are q, k, v and o: L * (2 + 2/G)*e*d (Lamina: 4*e*d*L for G = 1).
        """
        return ELEMENT_BYTES * wire_columns(self.shapes)

    def active_weights(self) -> float:
        """Return the weights of the layers that a token is multiplied by: k/E of those of the experts."""
        if not self.experts:
            return self.layer_weights
        return self.layer_weights - (1 - self.experts_per_token / self.experts) * self.expert_weights

    def read_bytes(self, tokens: float, *, expanded: bool = False) -> float:
        """Return the bytes of weights of the layers that are read for `tokens` tokens: e * W(tokens) in bfloat16.

        Of E experts they touch E * (1 - (1 - k/E)^tokens), if each token takes any k of them as likely.

        Args:
            tokens: Their number.
            expanded: Whether what is not in bfloat16 is written in it and read again first, as on GPUs.
        """
        untouched = (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        kinds = (
            (self.layer_weights - self.expert_weights, self.bits.layers),
            ((1 - untouched) * self.expert_weights, self.bits.experts),
        )
        more = _EXPANDED_BYTES if expanded else 0
        return sum(count * (bits / 8 + more * (bits != 8 * ELEMENT_BYTES)) for count, bits in kinds)


def _kept_file(directory: str) -> Path:
    """Return where the size of a model is kept, by all that it depends on: its trace, config.json and code."""
    import torch

    from hpcdecode.attention import shapes
    from hpcdecode.model.frontend import cache
    from hpcdecode.model.frontend.config import config_file
    from hpcdecode.model.frontend.gguf.folder import model_folder
    from hpcdecode.model.run import mixers
    from hpcdecode.system.kept import directory as directory_of_kept

    folder = model_folder(directory)
    files = (
        config_file(folder),
        *(Path(str(code)) for code in (__file__, traced.__file__, shapes.__file__, mixers.__file__)),
    )
    about = (file.read_text(encoding="utf-8") for file in files)
    return directory_of_kept() / f"{cache.key(folder, torch.bfloat16, *about)}.size"


def _experts_per_token(config: PretrainedConfig) -> int:
    """Return k, the routed experts that a token goes to; 0 if config.json does not say."""
    stated = (getattr(config, name, None) for name in ("num_experts_per_tok", "num_experts_per_token"))
    return next((k for k in stated if k), 0)
