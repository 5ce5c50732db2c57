"""The metadata of a model in GGUF files, and what its config takes of it in most architectures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.header import GgufEntry, GgufHeader
from hpcdecode.model.frontend.stated import MOST_LAYERS

COMMON = {  # metadata and config values of all these architectures
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
READ_ELSEWHERE = (  # the tensors state the vocabulary; for rotary scaling see rope.py
    *("block_count", "nextn_predict_layers", "vocab_size", "rope.scaling.finetuned"),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length")),
    *(f"rope.scaling.yarn_{name}" for name in ("attn_factor", "beta_fast", "beta_slow")),
)


class Metadata:
    """The metadata of an architecture. It keeps which values have been asked for.

    Args:
        header: Header of the first file.
        values: The metadata, without the architecture's prefix.
        tensors: All tensors of the files.

    Attributes:
        tensors: The tensors.
    """

    def __init__(self, header: GgufHeader, values: Mapping[str, Any], tensors: Mapping[str, GgufEntry]):
        self._header, self._values, self.tensors = header, values, tensors
        self._asked = set(READ_ELSEWHERE)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or `default` if it is not stated."""
        self._asked.add(name)
        return self._values.get(name, default)

    def size(self, name: str) -> int:
        """Return an integer above 0. Raise UserError if it is not stated, or another value."""
        found = self.get(name)
        if type(found) is not int or found <= 0:
            raise self.refused(f"one integer above 0 of {name}, got {found!r:.50}")
        return found

    def number(self, name: str, default: float) -> float:
        """Return a finite number above 0, or `default` if it is not stated. Raise UserError if it is another value."""
        found = self.get(name, default)
        if not is_number(found) or not 0 < found < math.inf:
            raise self.refused(f"one finite number above 0 of {name}, got {found!r:.50}")
        return float(found)

    def require(self, name: str, *expected: Any) -> None:
        """Raise UserError if a value is stated that is none of those `expected`."""
        if name in self._values and self.get(name) not in expected:
            known = " or ".join(map(repr, expected)) or "no value"
            raise self.refused(f"{known} of {name}, got {self._values[name]!r:.50}")

    def by_layer(self, name: str) -> list[Any]:
        """Return the values of layers, of which one may stand for all. Raise UserError if they are of other layers."""
        found, layers = self.get(name), self.layers
        values = found if isinstance(found, list) else [found] * layers
        if len(values) < layers or None in values:
            raise self.refused(f"{layers} values of {name}, one a layer, got {found!r:.50}")
        return values[:layers]

    def only(self, name: str, *others: Any) -> Any:
        """Return the value that all layers have, but for those that have one of `others`."""
        first, *rest = {value for value in self.by_layer(name) if value not in others} or {None}
        if rest:
            raise self.refused(f"one value of {name} for all layers, got {self.get(name)!r:.50}")
        return first

    def has(self, ending: str) -> bool:
        """Return whether a tensor has a name of this ending."""
        return any(name.endswith(ending) for name in self.tensors)

    @property
    def layers(self) -> int:
        """Return the number of layers, without those that predict later tokens."""
        blocks, predict = self.size("block_count"), self.get("nextn_predict_layers", 0)
        if blocks > MOST_LAYERS:
            raise self.refused(f"at most {MOST_LAYERS:,} layers of block_count, got {blocks:,}")
        if type(predict) is not int or not 0 <= predict < blocks:
            raise self.refused(f"fewer than {blocks} layers of nextn_predict_layers, got {predict!r:.50}")
        return blocks - predict

    @property
    def rope_base(self) -> float:
        """Return the base of rotary frequencies, which files need not state."""
        return self.number("rope.freq_base", 10000.0)

    @property
    def head_dim(self) -> int:
        """Return the size of an attention head. Raise UserError if keys and values have two sizes."""
        whole = self.size("embedding_length") // self.size("attention.head_count")
        found = self.size("attention.key_length") if self.get("attention.key_length") is not None else whole
        self.require("attention.value_length", found)
        return found

    def heads(self) -> dict[str, Any]:
        """Return the config of attention heads that are rotated as a whole."""
        self.require("rope.dimension_count", self.head_dim)
        return {"head_dim": self.head_dim, "attention_bias": self.has(".attn_q.bias")}

    def partly_rotated(self) -> dict[str, Any]:
        """Return the config of attention heads of which the first elements are rotated."""
        rotated = self.number("rope.dimension_count", self.head_dim)
        bias = self.has(".attn_q.bias")
        return {"head_dim": self.head_dim, "partial_rotary_factor": rotated / self.head_dim, "attention_bias": bias}

    def windows(self) -> dict[str, Any]:
        """Return the config of layers some of which see a window; without a window none do.

        Files state which, or the period of a layer without one, which is 4 if they state neither.
        """
        window, stated = self.get("attention.sliding_window"), self.get("attention.sliding_window_pattern", 4)
        if isinstance(stated, list):
            slides = self.by_layer("attention.sliding_window_pattern")
        else:
            period = 4 if stated == 4 else self.size("attention.sliding_window_pattern")
            slides = [bool((i + 1) % period) for i in range(self.layers)]
        return {
            "sliding_window": window or None,
            "layer_types": ["sliding_attention" if window and each else "full_attention" for each in slides],
        }

    def refused(self, expected: str) -> UserError:
        """Return the error for a model that cannot be run from its GGUF file."""
        return refused(self._header, expected)

    def require_read(self) -> None:
        """Raise UserError if the file states what nothing has asked for."""
        if unread := sorted(self._values.keys() - self._asked):
            raise self.refused(f"no metadata {unread[0]!r:.100}, whose meaning for this architecture is not known")


class ConfigTable(NamedTuple):
    """What a config takes of the metadata of an architecture.

    Attributes:
        names: Config values by metadata, beside COMMON. What the metadata does not state keeps its default.
        other: Returns the other config values.
    """

    names: Mapping[str, str] = MappingProxyType({})
    other: Callable[[Metadata], dict[str, Any]] = Metadata.heads


def config_of(table: ConfigTable, header: GgufHeader, metadata: Metadata) -> dict[str, Any]:
    """Return the config that metadata states.

    Raises:
        UserError: If it states what the config cannot.
    """
    embedding = metadata.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise metadata.refused("a matrix 'token_embd.weight'")
    config: dict[str, Any] = {"vocab_size": embedding.shape[0], "num_hidden_layers": metadata.layers}
    config["rope_theta"] = metadata.rope_base
    config |= {config: header.values.get(f"tokenizer.ggml.{name}_token_id") for name, config in SPECIAL_TOKENS.items()}
    for name, own in (COMMON | dict(table.names)).items():
        if (value := metadata.get(name)) is not None and (value != 0 or name in table.names):
            config[own] = value
    config |= table.other(metadata)
    metadata.require_read()
    return config


def is_number(value: Any) -> bool:
    """Return whether metadata is one number."""
    return type(value) in (int, float)


def refused(header: GgufHeader, expected: str) -> UserError:
    """Return the error for a model that cannot be run from its GGUF file."""
    return UserError(f"{header.file}: expected {expected}; give the model's directory in Hugging Face format")
