"""The config.json of architectures whose metadata transformers does not know."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hpcdecode.model.frontend.gguf.metadata import ConfigTable, Metadata

SOFTMAX, SIGMOID = 1, 2  # of metadata: how a router scores experts
RELEASED_GROUPS = {160: (8, 3), 256: (8, 4)}  # of DeepSeek-V2 and V3, by experts, which older converters left out
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
}
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def routed(m: Metadata, released: Mapping[int, tuple[int, int]] = MappingProxyType({})) -> dict[str, Any]:
    """Return how a router of DeepSeek chooses and weighs experts.

    Args:
        m: The metadata.
        released: Groups of experts, and how many are chosen, by experts, where none are stated; one for others.
    """
    groups, chosen = released.get(m.size("expert_count"), (1, 1))
    return {
        "n_group": m.get("expert_group_count", groups),
        "topk_group": m.get("expert_group_used_count", chosen),
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(m.get("expert_weights_norm", False)),
    }


def deepseek2(m: Metadata) -> dict[str, Any]:
    """Return the config of DeepSeek-V2, V3 and models alike, whose attention is over a latent."""
    rotated, heads = m.size("rope.dimension_count"), m.size("attention.head_count")
    split = m.has(".attn_k_b.weight")  # else written by older converters, which state K and V of heads
    key = m.size("attention.key_length_mla" if split else "attention.key_length")
    value = m.size("attention.value_length_mla" if split else "attention.value_length")
    if split:
        m.require("attention.head_count_kv", 1)
        m.require("attention.key_length", m.size("attention.kv_lora_rank") + rotated)
        m.require("attention.value_length", m.size("attention.kv_lora_rank"))
    multiplied = "rope.scaling.yarn_log_multiplier"
    mscale = None if m.get(multiplied) is None else round(10 * m.number(multiplied, 0.0), 5)
    config = {
        "num_key_value_heads": heads,
        "yarn": {} if mscale is None else dict.fromkeys(("mscale", "mscale_all_dim"), mscale),
        "q_lora_rank": m.get("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "attention_bias": False,
        **routed(m, RELEASED_GROUPS),
    }
    if m.has(".exp_probs_b.bias"):  # beside scores by sigmoid alone
        m.require("expert_gating_func", SIGMOID)
        return config
    m.require("expert_gating_func", SOFTMAX)
    m.require("expert_weights_norm", False)
    limited = config["n_group"] not in (None, 1)
    return {**config, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if limited else "greedy"}


def glm4moe(m: Metadata) -> dict[str, Any]:
    """Return the config of GLM-4.5 to 4.7."""
    m.require("expert_gating_func", SIGMOID)
    return {**m.partly_rotated(), **routed(m), "use_qk_norm": m.has(".attn_q_norm.weight")}


def smollm3(m: Metadata) -> dict[str, Any]:
    """Return the config of SmolLM3, of whose layers every fourth is not rotated."""
    return {**m.heads(), "no_rope_layer_interval": 4}


def olmo2(m: Metadata) -> dict[str, Any]:
    """Return the config of OLMo 2, or of OLMo 3, some of whose layers see a window."""
    if m.get("attention.sliding_window") is None:
        return m.heads()
    base = m.number("rope.freq_base_swa", m.rope_base)
    slides = {"rope_type": "default", "rope_theta": base}  # their frequencies are not scaled
    return {**m.heads(), **m.windows(), "model_type": "olmo3", "sliding_rope": slides}


def exaone4(m: Metadata) -> dict[str, Any]:
    """Return the config of EXAONE 4.0."""
    return {**m.heads(), **m.windows()}


def seed_oss(m: Metadata) -> dict[str, Any]:
    """Return the config of Seed-OSS."""
    return {**m.heads(), "attention_out_bias": m.has(".attn_output.bias"), "mlp_bias": False}


def granite_heads(m: Metadata) -> dict[str, Any]:
    """Return the config of heads of Granite. Granite 4 states them by layer, and the sizes of recurrences it lacks."""
    m.require("rope.scaling.finetuned", True)
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        m.get(f"ssm.{name}")
    return {**m.heads(), **granite_scale(m), "num_key_value_heads": m.only("attention.head_count_kv")}


def granite_scale(m: Metadata) -> dict[str, Any]:
    """Return the config of the scale of attention, which is the usual one if none is stated."""
    return {"attention_multiplier": m.number("attention.scale", m.head_dim**-0.5)}


def granite(m: Metadata) -> dict[str, Any]:
    """Return the config of Granite 3 and 4 without experts or recurrences, all layers of which are rotated."""
    m.require("expert_count", 0)
    m.require("expert_used_count", 0)
    width = m.get("expert_shared_feed_forward_length") or m.size("feed_forward_length")  # the former of Granite 4
    return {**granite_heads(m), "intermediate_size": width, "mlp_bias": m.has(".ffn_gate.bias")}


def granitemoe(m: Metadata) -> dict[str, Any]:
    """Return the config of Granite with experts, and with a shared expert if it has one."""
    shared = m.get("expert_shared_feed_forward_length")
    return granite_heads(m) | ({"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {})


def ernie_moe(m: Metadata) -> dict[str, Any]:
    """Return the config of ERNIE 4.5 with experts."""
    m.require("expert_gating_func", SOFTMAX)
    m.require("expert_weights_norm", True)
    m.get("expert_shared_feed_forward_length")  # of no use: converters divide the dense one's by heads
    return {**m.heads(), "moe_layer_end_index": -1}


def mistral3(m: Metadata) -> dict[str, Any]:
    """Return the config of Mistral Small 3, or of Ministral 3, whose queries are scaled by position."""
    scaled = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
    if m.get(scaled[0]) is None and m.get(scaled[1]) is None:
        return {**m.heads(), "sliding_window": None}
    if m.get("rope.scaling.type") != "yarn" or m.number("rope.scaling.factor", 1.0) == 1:
        raise m.refused(f"{scaled[0]} and {scaled[1]} beside rotary frequencies scaled by yarn")
    beta, mscale = (m.number(name, 0.0) for name in scaled)
    own = {"mscale": mscale, "mscale_all_dim": mscale, "llama_4_scaling_beta": beta}
    return {**m.heads(), "model_type": "ministral3", "sliding_window": None, "yarn": own}


def gemma4(m: Metadata) -> dict[str, Any]:
    """Return the config of the text part of Gemma 4, whose layers of full attention have other heads."""
    size, whole = m.size("attention.key_length_swa"), m.size("attention.key_length")
    m.require("attention.value_length_swa", size)
    m.require("attention.value_length", whole)
    m.require("rope.dimension_count_swa", size)
    m.require("rope.dimension_count", whole)
    windows, heads, width = m.windows(), m.by_layer("attention.head_count_kv"), m.by_layer("feed_forward_length")
    full = [i for i, kind in enumerate(windows["layer_types"]) if kind == "full_attention"]
    slide = [i for i, kind in enumerate(windows["layer_types"]) if kind != "full_attention"]
    if not full or not slide or any(len({heads[i] for i in own}) > 1 for own in (full, slide)):
        raise m.refused(f"one value of attention.head_count_kv for layers of one kind, got {heads}")
    per_layer = m.tensors.get("per_layer_token_embd.weight")
    return {
        **windows,
        "head_dim": size,
        "num_key_value_heads": heads[slide[0]],
        "per_layer_config": {str(i): {"head_dim": whole, "num_key_value_heads": heads[full[0]]} for i in full},
        "attention_k_eq_v": not any(f"blk.{i}.attn_v.weight" in m.tensors for i in full),
        "intermediate_size": width[0],
        "use_double_wide_mlp": width[-1] == 2 * width[0],
        "enable_moe_block": bool(m.get("expert_count")),
        "num_experts": m.get("expert_count") or None,
        **({} if per_layer is None else {"vocab_size_per_layer_input": per_layer.shape[0]}),
        "sliding_rope": {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", 10000.0)},
    }


def llama4(m: Metadata) -> dict[str, Any]:
    """Return the config of the text part of Llama 4, whose largest model has no norms of Q and K."""
    m.require("attention.sliding_window")
    return {**m.heads(), "use_qk_norm": m.size("expert_count") != 128}


EXPERT_COUNTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
GEMMA4 = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
ERNIE = {
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_shared_count": "moe_num_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval",
}
LLAMA4 = {
    **EXPERT_COUNTS,
    "expert_feed_forward_length": "intermediate_size",
    "feed_forward_length": "intermediate_size_mlp",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
DENSE_CONFIGS = {
    "deepseek2": ConfigTable({**ROUTED, "attention.kv_lora_rank": "kv_lora_rank"}, deepseek2),
    "glm4moe": ConfigTable(ROUTED, glm4moe),
    "smollm3": ConfigTable(other=smollm3),
    "granite": ConfigTable(MULTIPLIERS, granite),
    "granitemoe": ConfigTable(MULTIPLIERS | EXPERT_COUNTS, granitemoe),
    "glm4": ConfigTable(other=Metadata.partly_rotated),
    "olmo2": ConfigTable(other=olmo2),
    "exaone4": ConfigTable(other=exaone4),
    "seed_oss": ConfigTable(other=seed_oss),
    "ernie4_5": ConfigTable(),
    "ernie4_5-moe": ConfigTable(ERNIE, ernie_moe),
    "mistral3": ConfigTable(other=mistral3),
    "gemma4": ConfigTable(GEMMA4, gemma4),
    "llama4": ConfigTable(LLAMA4, llama4),
}
