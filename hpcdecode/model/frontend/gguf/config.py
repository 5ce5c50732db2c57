"""The config.json of a model in a GGUF file: transformers' reading of the metadata, and what that leaves out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend.gguf.dense_configs import DENSE_CONFIGS
from hpcdecode.model.frontend.gguf.header import F32, GgufHeader
from hpcdecode.model.frontend.gguf.hybrid_configs import HYBRID_CONFIGS
from hpcdecode.model.frontend.gguf.metadata import Metadata, config_of, refused
from hpcdecode.model.frontend.gguf.rope import rope_scaling
from hpcdecode.model.frontend.gguf.tables import own_values, table_of

CONFIGS = DENSE_CONFIGS | HYBRID_CONFIGS  # of architectures whose metadata transformers does not know
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


def stated_by(headers: Sequence[GgufHeader]) -> dict[str, Any]:
    """Return what config.json is to state of the model in GGUF files.

    Raises:
        UserError: If the metadata cannot be read, or describes a model that its architecture does not cover.
    """
    first = headers[0]
    architecture, table = table_of(first)
    tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
    values = own_values(first, architecture)
    if unread := [name for name in tensors if "rope_factors_" in name]:
        raise refused(first, f"no tensor {unread[0]!r}, since the frequencies of longrope change with the longest row")
    # Defaults of tokens are those of other vocabularies.
    config: dict[str, Any] = {"model_type": table.config, "pad_token_id": None}
    if architecture in CONFIGS:
        config |= config_of(CONFIGS[architecture], first, Metadata(first, values, tensors))
    else:
        config |= completed(first, architecture, values, tensors)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["dtype"] = "float32" if mostly_float32(headers) else "bfloat16"
    own, rope = config.pop("yarn", {}), rope_scaling(headers, values, config)
    if architecture in YARN:  # else its config would take that of the released models
        rope = {"rope_type": "default"} if rope is None else {**rope, **YARN[architecture]}
    if rope is not None:
        config["rope_scaling"] = rope | own
    if (slides := config.pop("sliding_rope", None)) is not None:
        scaled = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": config.pop("rope_theta")}
        config["rope_parameters"] = {"full_attention": scaled, "sliding_attention": slides}
    return config


def completed(
    header: GgufHeader, architecture: str, values: Mapping[str, Any], tensors: Collection[str]
) -> dict[str, Any]:
    """Return what transformers reads of the metadata, and what it leaves out.

    Raises:
        UserError: If the metadata cannot be read, or describes a model that its architecture does not cover.
    """
    for name in sorted(NUMBERS & values.keys()):
        if type(values[name]) not in (int, float) or not 0 < values[name] < math.inf:
            raise refused(header, f"one finite number above 0 of {architecture}.{name}, got {values[name]!r:.50}")
    if values.get("expert_count") and architecture not in HAS_EXPERTS:
        raise refused(header, f"no experts in the architecture {architecture!r}, got {values['expert_count']}")
    left_out = ("_model_name_or_path", "model_type")
    config = {name: value for name, value in by_transformers(header).items() if name not in left_out}
    for name, alike in ALIKE.get(architecture, {}).items():
        if name in values:
            config[alike] = values[name]
    if values.get("attention.sliding_window") and architecture not in HAS_WINDOW:
        raise refused(header, f"no sliding window in the architecture {architecture!r}")
    if architecture in ("llama", "qwen3", "qwen3moe", "gpt-oss"):
        config["attention_bias"] = any(".attn_q.bias" in name for name in tensors)
    set_heads(header, architecture, values, config)
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
