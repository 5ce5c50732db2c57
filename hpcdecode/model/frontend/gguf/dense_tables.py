"""The names of the tensors of GGUF files of models without recurrences, by architecture.

Source: the names of the package gguf (tensor_mapping.py).
"""

from __future__ import annotations

from hpcdecode.model.frontend.gguf.changes import (
    Values,
    convolution,
    correction_as_row,
    gate_as_row,
    interleaved,
    plus_one,
    size,
    transposed,
)
from hpcdecode.model.frontend.gguf.names import Experts, Joined, Layout, NameTable


def latent_heads(values: Values) -> Layout:
    """Return the layout of DeepSeek: rows of keys, transposed, and of values, by head."""
    return Layout(groups=size(values, "attention.head_count"), turned=(0,))


def behind(values: Values) -> Layout:
    """Return the layout of tensors one behind the other."""
    return Layout()


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {f"attn_{own}": f"self_attn.{own[0]}_proj" for own in ("q", "k", "v", "output")}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {f"attn_{own}_norm": f"self_attn.{own}_norm" for own in "qk"}
MLP = {f"ffn_{own}": f"mlp.{own}_proj" for own in ("gate", "up", "down")}
EXPERTS = {f"ffn_{own}_exps": f"mlp.experts.{{}}.{own}_proj" for own in ("gate", "up", "down")}
EXPERTS["ffn_gate_inp"] = "mlp.gate"
SHARED = {f"ffn_{own}_shexp": f"mlp.shared_expert.{own}_proj" for own in ("gate", "up", "down")}
SHARED["ffn_gate_inp_shexp"] = "mlp.shared_expert_gate"
GEMMA = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT2_TOP = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"}
GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
MINIMAX_EXPERTS = {
    f"ffn_{own}_exps": f"block_sparse_moe.experts.{{}}.w{n}" for own, n in (("gate", 1), ("down", 2), ("up", 3))
}
MINIMAX_EXPERTS["ffn_gate_inp"] = "block_sparse_moe.gate"
GPT_OSS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
GPT_OSS_EXPERTS = (
    Experts(
        "mlp.experts.gate_up_proj", ("ffn_gate_exps", "ffn_up_exps"), interleaved=True, by_column=True, biased=True
    ),
    Experts("mlp.experts.down_proj", ("ffn_down_exps",), by_column=True, biased=True),
)
LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
LFM2 = {
    **{f"attn_{own}": f"self_attn.{own}_proj" for own in "qkv"},
    "attn_output": "self_attn.out_proj",
    **{f"attn_{own}_norm": f"self_attn.{own}_layernorm" for own in "qk"},
    **{f"shortconv.{own}": f"conv.{own}" for own in ("conv", "in_proj", "out_proj")},
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"ffn_{own}": f"feed_forward.w{n}" for own, n in (("gate", 1), ("down", 2), ("up", 3))},
}
DENSE = ATTENTION | NORMS | MLP
PHI3 = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj"}
STARCODER2 = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
LATENT = {
    **{f"attn_{own}": f"self_attn.{own}_proj" for own in ("q", "q_a", "q_b", "kv_b")},
    **{f"attn_{own}_norm": f"self_attn.{own}_layernorm" for own in ("q_a", "kv_a")},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_output": "self_attn.o_proj",
}
SHARED_EXPERTS = {f"ffn_{own}_shexp": f"mlp.shared_experts.{own}_proj" for own in ("gate", "up", "down")}
ROUTED = EXPERTS | SHARED_EXPERTS
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GLM4 = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
GRANITE_EXPERTS = (
    Experts("block_sparse_moe.input_linear.weight", ("ffn_gate_exps", "ffn_up_exps")),
    Experts("block_sparse_moe.output_linear.weight", ("ffn_down_exps",)),
    Joined("shared_mlp.input_linear.weight", ("ffn_gate_shexp", "ffn_up_shexp"), behind),
)
GRANITE_MOE = {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear"}
GEMMA4_TOP = {
    **TOP,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GEMMA4 = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
}
GEMMA4_PARAMETERS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
GEMMA4_EXPERTS = (
    Experts("experts.gate_up_proj", ("ffn_gate_up_exps",)),
    Experts("experts.down_proj", ("ffn_down_exps",)),
)
LLAMA4 = {
    **{f"ffn_{own}": f"feed_forward.{own}_proj" for own in ("gate", "up", "down")},
    **{f"ffn_{own}_shexp": f"feed_forward.shared_expert.{own}_proj" for own in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
}
LLAMA4_EXPERTS = (
    Experts("feed_forward.experts.gate_up_proj", ("ffn_gate_exps", "ffn_up_exps"), by_column=True),
    Experts("feed_forward.experts.down_proj", ("ffn_down_exps",), by_column=True),
)
QKV_BIASES = frozenset({"attn_q", "attn_k", "attn_v"})
ALL_BIASES = frozenset(DENSE)
NO_BIASES = frozenset[str]()
DENSE_TABLES = {
    "llama": NameTable("llama", TOP, DENSE, change=interleaved),
    "qwen2": NameTable("qwen2", TOP, DENSE),
    "qwen2moe": NameTable("qwen2_moe", TOP, ATTENTION | NORMS | EXPERTS | SHARED, change=gate_as_row),
    "qwen3": NameTable("qwen3", TOP, DENSE | HEAD_NORMS),
    "qwen3moe": NameTable("qwen3_moe", TOP, ATTENTION | NORMS | HEAD_NORMS | EXPERTS),
    "phi3": NameTable("phi3", TOP, NORMS | PHI3 | {"ffn_down": "mlp.down_proj"}),
    "gemma2": NameTable("gemma2", TOP, ATTENTION | MLP | GEMMA, change=plus_one),
    "gemma3": NameTable("gemma3_text", TOP, ATTENTION | MLP | GEMMA | HEAD_NORMS, change=plus_one),
    "gpt-oss": NameTable(
        "gpt_oss",
        TOP,
        ATTENTION | GPT_OSS,
        parameters={"attn_sinks.weight": "self_attn.sinks"},
        wholes=GPT_OSS_EXPERTS,
    ),
    "minimax-m2": NameTable(
        "minimax_m2",
        TOP,
        ATTENTION | NORMS | HEAD_NORMS | MINIMAX_EXPERTS,
        parameters={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    ),
    "lfm2": NameTable("lfm2", LFM2_TOP, LFM2, change=convolution),
    "starcoder2": NameTable("starcoder2", TOP, ATTENTION | NORMS | STARCODER2),
    "stablelm": NameTable("stablelm", TOP, DENSE),
    "gpt2": NameTable("gpt2", GPT2_TOP | {"output": "lm_head"}, GPT2_LAYER, "transformer.h", transposed),
    "deepseek2": NameTable(
        "deepseek_v3",
        TOP,
        LATENT | NORMS | MLP | ROUTED,
        parameters=CORRECTION,
        wholes=(Joined("self_attn.kv_b_proj.weight", ("attn_k_b", "attn_v_b"), latent_heads),),
        biases=NO_BIASES,
    ),
    "glm4moe": NameTable(
        "glm4_moe",
        TOP,
        ATTENTION | HEAD_NORMS | MLP | ROUTED | {"attn_norm": "input_layernorm"} | POST_NORMS,
        parameters=CORRECTION,
        biases=QKV_BIASES,
    ),
    "smollm3": NameTable("smollm3", TOP, DENSE, change=interleaved, biases=ALL_BIASES),
    "granite": NameTable("granite", TOP, DENSE, change=interleaved, biases=ALL_BIASES),
    "granitemoe": NameTable(
        "granitemoe",
        TOP,
        ATTENTION | NORMS | GRANITE_MOE,
        change=interleaved,
        wholes=GRANITE_EXPERTS,
        biases=ALL_BIASES,
    ),
    "glm4": NameTable("glm4", TOP, ATTENTION | GLM4, biases=QKV_BIASES),
    "olmo2": NameTable("olmo2", TOP, ATTENTION | HEAD_NORMS | MLP | POST_NORMS, biases=ALL_BIASES),
    "exaone4": NameTable("exaone4", TOP, ATTENTION | HEAD_NORMS | MLP | POST_NORMS, biases=NO_BIASES),
    "seed_oss": NameTable(
        "seed_oss",
        TOP,
        ATTENTION | MLP | NORMS | {"post_attention_norm": "post_attention_layernorm"},
        biases=QKV_BIASES | {"attn_output"},
    ),
    "ernie4_5": NameTable("ernie4_5", TOP, DENSE, biases=ALL_BIASES),
    "ernie4_5-moe": NameTable(
        "ernie4_5_moe",
        TOP,
        DENSE | ROUTED,
        change=correction_as_row,
        parameters={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        biases=NO_BIASES,
    ),
    "mistral3": NameTable("mistral", TOP, DENSE, change=interleaved, biases=NO_BIASES),
    "gemma4": NameTable(
        "gemma4_text",
        GEMMA4_TOP,
        ATTENTION | HEAD_NORMS | MLP | GEMMA | GEMMA4,
        parameters=GEMMA4_PARAMETERS,
        wholes=GEMMA4_EXPERTS,
        biases=NO_BIASES,
    ),
    "llama4": NameTable("llama4_text", TOP, ATTENTION | NORMS | LLAMA4, wholes=LLAMA4_EXPERTS, biases=NO_BIASES),
}
