"""The config.json of architectures with recurrences whose metadata transformers does not know."""

from __future__ import annotations

from typing import Any

from hpcdecode.model.frontend.gguf.dense_configs import MULTIPLIERS, ROUTED, granite_scale, routed
from hpcdecode.model.frontend.gguf.metadata import ConfigTable, Metadata

DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
SHARED = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
MAMBA = {  # with this prefix
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
PLAIN_MAMBA = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "num_heads",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
}
NEMOTRON = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    **{name: config for name, config in ROUTED.items() if name != "leading_dense_block_count"},
}


def per_head(m: Metadata) -> int:
    """Return the size of a head of a recurrence. Raise UserError if heads do not make up the whole."""
    inner, heads = m.size("ssm.inner_size"), m.size("ssm.time_step_rank")
    if inner % heads:
        raise m.refused(f"ssm.inner_size in {heads} heads, got {inner}")
    return inner // heads


def expansion(m: Metadata) -> int:
    """Return how many times as wide as the model a recurrence is. Raise UserError if it is no whole number."""
    hidden, inner = m.size("embedding_length"), m.size("ssm.inner_size")
    if inner % hidden:
        raise m.refused(f"ssm.inner_size in multiples of {hidden}, got {inner}")
    return inner // hidden


def delta(m: Metadata) -> dict[str, Any]:
    """Return the config of Qwen3-Next and Qwen3.5, most of whose layers are of the gated delta rule."""
    every = m.size("full_attention_interval") if m.get("full_attention_interval") is not None else 4
    by_interval = [bool((i + 1) % every) for i in range(m.layers)]
    recurrent = by_interval if m.get("attention.recurrent_layers") is None else m.by_layer("attention.recurrent_layers")
    m.get("rope.dimension_sections")  # of a text all are of one position
    return {
        **m.partly_rotated(),
        "linear_value_head_dim": per_head(m),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "norm_topk_prob": True,
    }


def granitehybrid(m: Metadata) -> dict[str, Any]:
    """Return the config of Granite 4 with recurrences."""
    heads = m.by_layer("attention.head_count_kv")
    shared = m.get("expert_shared_feed_forward_length")
    return {
        **m.heads(),
        **granite_scale(m),
        "num_key_value_heads": m.only("attention.head_count_kv", 0),
        "layer_types": ["full_attention" if each else "linear_attention" for each in heads],
        "position_embedding_type": "rope" if m.get("rope.scaling.finetuned", True) else None,
        "num_local_experts": m.get("expert_count", 0),
        "num_experts_per_tok": m.get("expert_used_count", 0),
        "shared_intermediate_size": shared or m.size("feed_forward_length"),
        "mamba_expand": expansion(m),
        "mamba_d_head": per_head(m),
        "mamba_conv_bias": m.has(".ssm_conv1d.bias"),
        "mamba_proj_bias": m.has(".ssm_in.bias"),
    }


def nemotron_h(m: Metadata) -> dict[str, Any]:
    """Return the config of Nemotron-H and Nemotron 3, each of whose layers is of one kind."""
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    layers = range(m.layers)
    found = [[kind for own, kind in kinds.items() if f"blk.{i}.{own}.weight" in m.tensors] for i in layers]
    if wrong := [i for i in layers if len(found[i]) != 1]:
        raise m.refused(f"layers of one of the kinds {', '.join(kinds.values())}, got {found[wrong[0]]} in one")
    m.require("rope.scaling.finetuned", False)
    m.by_layer("feed_forward_length")  # tensors state it, too
    dense = [m.tensors[f"blk.{i}.ffn_up.weight"].shape[0] for i in layers if found[i] == ["mlp"]]
    return {
        **m.heads(),
        **(routed(m) if m.get("expert_count") else {}),
        "num_key_value_heads": m.only("attention.head_count_kv", 0),
        "layers_block_type": [kind for (kind,) in found],
        "intermediate_size": max(dense, default=1),
        "mamba_head_dim": per_head(m),
        "use_conv_bias": m.has(".ssm_conv1d.bias"),
    }


def falcon_h1(m: Metadata) -> dict[str, Any]:
    """Return the config of Falcon-H1, whose multipliers are in its weights."""
    if "output.weight" not in m.tensors:
        raise m.refused("a matrix 'output.weight', since that of embeddings has another multiplier")
    return {
        **m.heads(),
        "mamba_d_ssm": m.size("ssm.inner_size"),
        "mamba_d_head": per_head(m),
        "mamba_rms_norm": False,
        "mamba_conv_bias": m.has(".ssm_conv1d.bias"),
        "mamba_proj_bias": m.has(".ssm_in.bias"),
        "projectors_bias": m.has(".ssm_out.bias"),
    }


def mamba2(m: Metadata) -> dict[str, Any]:
    """Return the config of Mamba-2."""
    return {
        "head_dim": per_head(m),
        "expand": expansion(m),
        "use_bias": m.has(".ssm_in.bias"),
        "use_conv_bias": m.has(".ssm_conv1d.bias"),
    }


HYBRID_CONFIGS = {
    "qwen3next": ConfigTable(DELTA | SHARED, delta),
    "qwen35": ConfigTable(DELTA, delta),
    "qwen35moe": ConfigTable(DELTA | SHARED, delta),
    "granitehybrid": ConfigTable(MULTIPLIERS | MAMBA, granitehybrid),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), ConfigTable(NEMOTRON, nemotron_h)),
    "falcon-h1": ConfigTable(MAMBA, falcon_h1),
    "mamba2": ConfigTable(PLAIN_MAMBA, mamba2),
}
