"""The names of the tensors of GGUF files of models with recurrences, by architecture."""

from __future__ import annotations

from hpcdecode.model.frontend.gguf.changes import Values, gated_delta, llama_hybrid, recurrence, size, sorted_values
from hpcdecode.model.frontend.gguf.dense_tables import (
    ATTENTION,
    EXPERTS,
    GRANITE_EXPERTS,
    GRANITE_MOE,
    HEAD_NORMS,
    MLP,
    NORMS,
    SHARED,
    TOP,
    behind,
)
from hpcdecode.model.frontend.gguf.names import Joined, Layout, NameTable


def by_key_head(values: Values) -> Layout:
    """Return the layout of Qwen3-Next: rows of Q, K, V and gates, by head of K."""
    keys = size(values, "ssm.group_count")
    width = keys * size(values, "ssm.state_size")
    return Layout(groups=keys, runs=((width, width, size(values, "ssm.inner_size")),))


def mixer(name: str) -> dict[str, str]:
    """Return the modules of a Mamba-2 mixer of this name."""
    own = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {module: f"{name}.{key}" for module, key in own.items()}


def mixer_parameters(name: str) -> dict[str, str]:
    """Return the parameters of a Mamba-2 mixer of this name."""
    return {"ssm_a": f"{name}.A_log", "ssm_d": f"{name}.D", "ssm_dt.bias": f"{name}.dt_bias"}


DELTA = {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
DELTA_PARAMETERS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
QWEN35 = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
NEMOTRON = {
    "attn_norm": "norm",
    **{f"attn_{own}": f"mixer.{own[0]}_proj" for own in ("q", "k", "v", "output")},
    **{f"ffn_{own}": f"mixer.{own}_proj" for own in ("up", "down")},
    **{f"ffn_{own}_exps": f"mixer.experts.{{}}.{own}_proj" for own in ("up", "down")},
    **{f"ffn_{own}_shexp": f"mixer.shared_experts.{own}_proj" for own in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
}
BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
NO_BIASES = frozenset[str]()
MIXER_BIASES = frozenset({"ssm_in", "ssm_conv1d", "ssm_out"})
NEMOTRON_TABLE = NameTable(
    "nemotron_h",
    BACKBONE,
    mixer("mixer") | NEMOTRON,
    "backbone.layers",
    llama_hybrid,  # though heads are not rotated
    mixer_parameters("mixer") | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    biases=frozenset({"ssm_conv1d"}),
)
HYBRID_TABLES = {
    "qwen3next": NameTable(
        "qwen3_next",
        TOP,
        ATTENTION | HEAD_NORMS | EXPERTS | SHARED | DELTA | {"ssm_ba": "linear_attn.in_proj_ba"},
        change=gated_delta,
        parameters=DELTA_PARAMETERS,
        wholes=(Joined("linear_attn.in_proj_qkvz.weight", ("attn_qkv", "attn_gate"), by_key_head),),
        biases=NO_BIASES,
    ),
    "qwen35": NameTable(
        "qwen3_5_text",
        TOP,
        ATTENTION | HEAD_NORMS | MLP | DELTA | QWEN35,
        change=sorted_values,
        parameters=DELTA_PARAMETERS,
        biases=NO_BIASES,
    ),
    "qwen35moe": NameTable(
        "qwen3_5_moe_text",
        TOP,
        ATTENTION | HEAD_NORMS | EXPERTS | SHARED | DELTA | QWEN35,
        change=sorted_values,
        parameters=DELTA_PARAMETERS,
        biases=NO_BIASES,
    ),
    "granitehybrid": NameTable(
        "granitemoehybrid",
        TOP,
        ATTENTION | NORMS | GRANITE_MOE | {"ffn_down": "shared_mlp.output_linear"} | mixer("mamba"),
        change=llama_hybrid,
        parameters=mixer_parameters("mamba"),
        wholes=(*GRANITE_EXPERTS, Joined("shared_mlp.input_linear.weight", ("ffn_gate", "ffn_up"), behind)),
        biases=MIXER_BIASES,
    ),
    "nemotron_h": NEMOTRON_TABLE,
    "nemotron_h_moe": NEMOTRON_TABLE,
    "falcon-h1": NameTable(
        "falcon_h1",
        {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        ATTENTION
        | {f"ffn_{own}": f"feed_forward.{own}_proj" for own in ("gate", "up", "down")}
        | {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
        | {module: key for module, key in mixer("mamba").items() if module != "ssm_norm"},
        change=recurrence,
        parameters=mixer_parameters("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
        biases=MIXER_BIASES,
    ),
    "mamba2": NameTable(
        "mamba2",
        BACKBONE,
        mixer("mixer") | {"attn_norm": "norm"},
        "backbone.layers",
        recurrence,
        mixer_parameters("mixer"),
        biases=MIXER_BIASES,
    ),
}
