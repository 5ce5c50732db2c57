"""What a model directory's JSON files state, checked before any code of transformers relies on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdecode.errors import UserError

MOST_LAYERS = 1024
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Largest values of sizes of a model; null stands for a default of its architecture.
MOST = {
    **dict.fromkeys(("vocab_size", "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), 1 << 24),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "head_dim"), 1 << 18),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"), 1 << 14),
    **dict.fromkeys((*LAYER_KEYS, "depth"), MOST_LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), (1 << 31) - 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1 << 14),
    **dict.fromkeys(("ngram_size", "ple_conv_kernel_size", "heads_per_ngram"), 1 << 10),  # of embeddings of tokens
    **dict.fromkeys(("ple_embed_dim", "split_ngram_parts", "make_ngram_vocab_size_divisible_by"), 1 << 18),
    "ngram_vocab_size_base": (1 << 31) - 1,
}
MAY_BE_ZERO = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"})
MAY_BE_ZERO |= {"moe_intermediate_size", "sliding_window"}
ROTATED = "qk_rope_head_dim"  # of latent attention; where it is 0, as in GLM-5-Next, so is head_dim
# JSON types of other values.
TYPES = {
    **dict.fromkeys(("model_type", "dtype", "torch_dtype", "hidden_act"), (str, "text")),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config"), (dict, "an object")),
    **dict.fromkeys(("architectures", "layer_types"), (list, "a list")),
}
LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")  # with one entry a layer


def check_values(file: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError if a value in `config`, which comes from `file`, has a wrong type or is out of its range."""
    for name, value in config.items():
        kind, expected = TYPES.get(name, (object, ""))
        if value is not None and not isinstance(value, kind):
            raise UserError(f"{file}: {name}: expected {expected}, got {value!r:.100}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{file}: {name}: expected a finite number, got {value}")
    check_sizes(file, config)
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict):  # a tower
            check_sizes(file, value)
    layers = layers_of(config)
    for name in LISTS:
        found = config.get(name)
        if isinstance(found, list) and layers is not None and len(found) != layers:
            raise UserError(f"{file}: {name}: expected {layers} entries, one a layer, got {len(found)}")


def layers_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers that `config` states, or None."""
    return next((config[key] for key in LAYER_KEYS if isinstance(config.get(key), int)), None)


def check_sizes(file: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError if a size in `config`, which comes from `file`, is no integer or is out of its range."""
    may_be_zero = MAY_BE_ZERO | {"head_dim"} if config.get(ROTATED) == 0 else MAY_BE_ZERO
    for name, value in config.items():
        if name in MOST and value is not None:
            for each in value if isinstance(value, list) else [value]:
                check_size(file, name, each, least=0 if name in may_be_zero else 1)


def check_size(file: Path, name: str, value: object, least: int) -> None:
    """Raise UserError if `value`, of the size `name` in `file`, is no integer or is out of its range."""
    if type(value) is not int or not least <= value <= MOST[name]:
        raise UserError(f"{file}: {name}: expected an integer from {least} to {MOST[name]:,}, got {value!r:.100}")
