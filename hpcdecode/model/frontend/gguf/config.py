"""The config.json of a model in a GGUF file: transformers' reading of the metadata, and what that leaves out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend.gguf.header import GgufHeader
from hpcdecode.model.frontend.gguf.names import own_values, table_of

STATES_HEAD_DIM = frozenset({"llama", "qwen3", "qwen3moe", "gemma2", "gemma3", "gpt-oss", "minimax-m2"})
PARTLY_ROTATED = frozenset({"stablelm", "phi3", "minimax-m2"})
HAS_EXPERTS = frozenset({"qwen2moe", "qwen3moe", "gpt-oss", "minimax-m2"})
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the size whose queries are scaled by hidden size / heads
ALIKE = {  # metadata and config values that transformers' table leaves out, by architecture
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping"},
    "phi3": {"attention.sliding_window": "sliding_window"},
    "starcoder2": {"rope.freq_base": "rope_theta", "attention.sliding_window": "sliding_window"},
    "stablelm": {"rope.freq_base": "rope_theta"},
    "gpt2": {"context_length": "n_positions"},
    "gpt-oss": {
        "expert_feed_forward_length": "intermediate_size",
        "attention.sliding_window": "sliding_window",
    },
    "minimax-m2": {"expert_feed_forward_length": "intermediate_size"},
    "lfm2": {"attention.layer_norm_rms_epsilon": "norm_eps"},
}
NUMBERS = frozenset(  # metadata that is computed with here
    {"embedding_length", "attention.head_count", "attention.key_length", "attention.value_length"}
    | {"rope.dimension_count", "rope.freq_base"}
)
HAS_WINDOW = frozenset({"gemma2", "gemma3", "phi3", "starcoder2", "gpt-oss"})
MISREAD = frozenset({"gpt-oss"})  # transformers 5.24 fails at their rotary scaling, but has a table of their metadata
YARN = {"gpt-oss": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}  # what no metadata states
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FREQUENCIES = "rope_freqs.weight"  # divisors of rotary frequencies
F32 = 0  # number of the block type


def stated_by(headers: Sequence[GgufHeader]) -> dict[str, Any]:
    """Return what config.json is to state of the model in GGUF files.

    Raises:
        UserError: If the metadata cannot be read, or describes a model that its architecture does not cover.
    """
    first = headers[0]
    architecture, table = table_of(first)
    tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
    values = own_values(first, architecture)
    for name in sorted(NUMBERS & values.keys()):
        if type(values[name]) not in (int, float) or not 0 < values[name] < math.inf:
            raise refused(first, f"one finite number above 0 of {architecture}.{name}, got {values[name]!r:.50}")
    if unread := [name for name in tensors if name.startswith("rope_factors_")]:
        raise refused(first, f"no tensor {unread[0]!r}, since the frequencies of longrope change with the longest row")
    if values.get("expert_count") and architecture not in HAS_EXPERTS:
        raise refused(first, f"no experts in the architecture {architecture!r}, got {values['expert_count']}")
    config = {**by_transformers(first), "model_type": table.config}
    config = {name: value for name, value in config.items() if name != "_model_name_or_path"}
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config.setdefault("pad_token_id", None)  # defaults are tokens of other vocabularies
    config["dtype"] = "float32" if mostly_float32(headers) else "bfloat16"
    for name, alike in ALIKE.get(architecture, {}).items():
        if name in values:
            config[alike] = values[name]
    if values.get("attention.sliding_window") and architecture not in HAS_WINDOW:
        raise refused(first, f"no sliding window in the architecture {architecture!r}")
    if architecture in ("llama", "qwen3", "qwen3moe", "gpt-oss"):
        config["attention_bias"] = any(".attn_q.bias" in name for name in tensors)
    set_heads(first, architecture, values, config)
    rope = rope_scaling(headers, values, config)
    if architecture in YARN:  # else its config would take that of the released models
        rope = {"rope_type": "default"} if rope is None else {**rope, **YARN[architecture]}
    if rope is not None:
        config["rope_scaling"] = rope
    return config


def by_transformers(header: GgufHeader) -> dict[str, Any]:
    """Return what transformers reads of the metadata. The header has been checked before."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    architecture, table = table_of(header)
    if architecture in MISREAD:
        names: Any = GGUF_CONFIG_MAPPING[table.config]
        known = {names[name]: v for name, v in own_values(header, architecture).items() if names.get(name)}
        return {"vocab_size": header.values.get("tokenizer.ggml.tokens"), **known}
    try:
        found: dict[str, Any] = load_gguf_checkpoint(str(header.file), return_tensors=False)["config"]  # type: ignore[no-untyped-call]
        return found
    except Exception as e:
        raise UserError(f"{header.file}: its metadata cannot be used: {first_line(e)}; copy the file again") from e


def mostly_float32(headers: Sequence[GgufHeader]) -> bool:
    """Return whether most bytes of the tensors are float32."""
    entries = [entry for header in headers for entry in header.tensors.values()]
    wide = sum(entry.nbytes for entry in entries if entry.type == F32)
    return 2 * wide > sum(entry.nbytes for entry in entries)


def set_heads(header: GgufHeader, architecture: str, values: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Complete `config` by the sizes of attention heads, and by how much of them is rotated."""
    hidden, heads = values.get("embedding_length"), values.get("attention.head_count")
    if type(hidden) is not int or type(heads) is not int or hidden < heads:
        raise refused(header, f"embedding_length of attention.head_count or more, got {hidden!r:.50} and {heads!r:.50}")
    size = values.get("attention.key_length", None if architecture.startswith("gemma") else hidden // heads)
    if values.get("attention.value_length", size) != size:
        raise refused(header, "heads whose keys and values have one size")
    rotated = values.get("rope.dimension_count", size)
    if architecture in STATES_HEAD_DIM:
        if "attention.key_length" not in values and architecture == "llama":
            size = rotated  # which older converters state alone
        if size is not None:
            config["head_dim"] = size
    elif size != hidden // heads:
        raise refused(header, f"heads of {hidden // heads} in the architecture {architecture!r}, got {size}")
    if architecture in PARTLY_ROTATED:
        config["partial_rotary_factor"] = rotated / size
    elif size is not None and rotated not in (size, None) and architecture != "gpt2":
        raise refused(header, f"rotated heads of {size} in the architecture {architecture!r}, got {rotated}")
    if architecture in LARGEST_GEMMA:
        large = values.get("block_count") == LARGEST_GEMMA[architecture]
        config["query_pre_attn_scalar"] = hidden // heads if large else config.get("head_dim", 256)


def rope_scaling(
    headers: Sequence[GgufHeader], values: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return how rotary frequencies are scaled; None if they are not.

    Raises:
        UserError: If they are scaled in a way that is not known.
    """
    kind, factor = values.get("rope.scaling.type", "none"), values.get("rope.scaling.factor")
    for header in headers:
        if entry := header.tensors.get(FREQUENCIES):
            data = np.memmap(header.file, mode="r")[entry.first : entry.first + entry.nbytes]
            return llama3(header, data.view("<f4") if entry.type == F32 else data, config)
    if kind == "none" or factor in (None, 0, 1):
        return None
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf or kind not in ("linear", "yarn"):
        raise refused(headers[0], f"rotary frequencies scaled by linear or yarn, got {kind!r:.50} by {factor!r:.50}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    original = values.get("rope.scaling.original_context_length", config.get("max_position_embeddings"))
    return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}


def llama3(header: GgufHeader, divisors: np.ndarray[Any, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of Llama 3 that has these divisors of the frequencies.

    Source: `_compute_llama3_parameters` of transformers.

    Raises:
        UserError: If they are those of another scaling.
    """
    size, base = config.get("head_dim") or 0, config.get("rope_theta", 10000.0)
    factor = float(np.max(divisors, initial=0))
    if divisors.shape == (size // 2,) and 1 <= factor < math.inf and base > 1:
        waves = 2 * math.pi * base ** (np.arange(0, size, 2) / size)
        turns = LLAMA3["original_max_position_embeddings"] / waves
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise refused(header, f"divisors of rotary frequencies in {FREQUENCIES!r} as Llama 3 has them, got others")


def refused(header: GgufHeader, expected: str) -> UserError:
    """Return the error for a model that cannot be run from its GGUF file."""
    return UserError(f"{header.file}: expected {expected}; give the model's directory in Hugging Face format")
