"""Small models of architectures whose metadata in GGUF files transformers cannot read."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.support.gguf_converted import convert, save_ternary
from tests.support.models import EXPERTS, LATENT, SHAPE, YARN_ROPE

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF = {**ROPE, "partial_rotary_factor": 0.5}
FOUR = {**SHAPE, "num_hidden_layers": 4}
SCALES = dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2)
SCALED = {"embedding_scale": 3.0, "logit_scale": 2.0, "residual_scale": 0.5, "attention.scale": 0.2}
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
OF_LOCAL = {"expert_count": 4, "expert_used_count": 2}
ROUTED = {
    **{"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1, "expert_feed_forward_length": 32},
    **{"leading_dense_block_count": 1, "expert_weights_scale": 2.5},
}
OF_LATENT = {
    **ROUTED,
    **{"attention.q_lora_rank": 24, "attention.kv_lora_rank": 32, "rope.dimension_count": 8},
    **{"attention.head_count_kv": 1, "attention.key_length": 40, "attention.value_length": 32},
    **{"attention.key_length_mla": 24, "attention.value_length_mla": 20},
}
YARN = {
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256},
    "rope.scaling.yarn_log_multiplier": 0.1,
}
SLIDES = [True, True, True, False]
OLMO3_ROPE = {
    "full_attention": {
        **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64},
        **{"attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 1.0},
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OF_OLMO3_ROPE = {
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64},
    **{"rope.scaling.yarn_attn_factor": 1.2, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 1.0},
    "rope.freq_base_swa": 1e4,
}
LAYERS = ["sliding_attention", "full_attention"] * 2
GEMMA4 = dict(**FOUR, head_dim=16, global_head_dim=32, sliding_window=4, layer_types=LAYERS)
OF_GEMMA4 = {
    **{"attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False] * 2},
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 32),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), 16),
    "rope.freq_base_swa": 1e4,
}
OF_GEMMA4_ROPE = {"rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 12)}
MINISTRAL_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
OF_MINISTRAL_ROPE = {
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 4},
    **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
    **{"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
}
LLAMA4_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 1.0},
}
WAVES = 2 * torch.pi * 5e5 ** (torch.arange(0, 32, 2) / 32)
OF_LLAMA4_ROPE = {"rope_freqs.weight": torch.where(WAVES > 8192, 16.0, 1.0)}
MODELS = {  # the name in GGUF, the config, and metadata that the writer does not take from it
    "deepseek_v2": (
        "deepseek2",
        lambda t: t.DeepseekV2Config(
            **LATENT, n_group=2, topk_group=1, topk_method="group_limited_greedy", routed_scaling_factor=2.5
        ),
        {**OF_LATENT, "expert_group_count": 2, "expert_group_used_count": 1},
    ),
    "deepseek_v2_lite": (
        "deepseek2",
        lambda t: t.DeepseekV2Config(**{**LATENT, "q_lora_rank": None}, routed_scaling_factor=2.5),
        {**OF_LATENT, "attention.q_lora_rank": None, "expert_gating_func": 1},
    ),
    "deepseek_v3": (
        "deepseek2",
        lambda t: t.DeepseekV3Config(**LATENT, n_group=2, topk_group=1, rope_parameters=YARN_ROPE),
        {
            **OF_LATENT,
            **YARN,
            **{"expert_group_count": 2, "expert_group_used_count": 1},
            **{"expert_weights_norm": True, "expert_gating_func": 2},
        },
    ),
    "glm4_moe_lite": (
        "deepseek2",
        lambda t: t.Glm4MoeLiteConfig(**LATENT, routed_scaling_factor=2.5),
        {**OF_LATENT, "expert_weights_norm": True},
    ),
    "glm4_moe": (
        "glm4moe",
        lambda t: t.Glm4MoeConfig(
            **SHAPE,
            **EXPERTS,
            head_dim=32,
            n_routed_experts=8,
            n_shared_experts=1,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
            attention_bias=True,
            rope_parameters=HALF,
        ),
        {**ROUTED, "expert_gating_func": 2, "expert_weights_norm": True, "nextn_predict_layers": 1, "block_count": 4},
    ),
    "smollm3": ("smollm3", lambda t: t.SmolLM3Config(**FOUR), {}),
    "granite": ("granite", lambda t: t.GraniteConfig(**SHAPE, **SCALES), SCALED),
    "granite_moe": (
        "granitemoe",
        lambda t: t.GraniteMoeSharedConfig(**SHAPE, **SCALES, **LOCAL, shared_intermediate_size=96),
        {**SCALED, **OF_LOCAL, "expert_shared_feed_forward_length": 96},
    ),
    "glm4": ("glm4", lambda t: t.Glm4Config(**SHAPE, head_dim=32, attention_bias=True, rope_parameters=HALF), {}),
    "olmo2": ("olmo2", lambda t: t.Olmo2Config(**SHAPE), {}),
    "olmo3": (
        "olmo2",
        lambda t: t.Olmo3Config(**FOUR, sliding_window=4, rope_parameters=OLMO3_ROPE),
        {**OF_OLMO3_ROPE, "attention.sliding_window": 4, "attention.sliding_window_pattern": SLIDES},
    ),
    "exaone4": (
        "exaone4",
        lambda t: t.Exaone4Config(**FOUR, head_dim=32, sliding_window=4, sliding_window_pattern=4),
        {"attention.sliding_window": 4, "attention.sliding_window_pattern": SLIDES},
    ),
    "seed_oss": ("seed_oss", lambda t: t.SeedOssConfig(**SHAPE, head_dim=32), {}),
    "ernie4_5": ("ernie4_5", lambda t: t.Ernie4_5Config(**SHAPE, head_dim=32), {}),
    "ernie4_5_moe": (
        "ernie4_5-moe",
        lambda t: t.Ernie4_5_MoeConfig(
            **SHAPE, moe_num_experts=8, moe_k=2, moe_intermediate_size=32, moe_layer_end_index=-1
        ),
        {**ROUTED, "expert_shared_count": 2, "expert_weights_scale": None, "interleave_moe_layer_step": 1},
    ),
    "mistral3": ("mistral3", lambda t: t.MistralConfig(**SHAPE, head_dim=32, sliding_window=None), {}),
    "ministral3": (
        "mistral3",
        lambda t: t.Ministral3Config(**SHAPE, head_dim=32, rope_parameters=MINISTRAL_ROPE),
        OF_MINISTRAL_ROPE,
    ),
    "gemma4": (
        "gemma4",
        lambda t: t.Gemma4TextConfig(
            **GEMMA4,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=512,
            use_double_wide_mlp=True,
            final_logit_softcapping=30.0,
        ),
        {
            **{**OF_GEMMA4, "extra": OF_GEMMA4_ROPE, "embedding_length_per_layer_input": 8},
            **{"attention.shared_kv_layers": 2, "feed_forward_length": [128, 128, 256, 256]},
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_moe": (
        "gemma4",
        lambda t: t.Gemma4TextConfig(
            **GEMMA4,
            hidden_size_per_layer_input=0,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
        {
            **{**OF_GEMMA4, **OF_LOCAL, "extra": OF_GEMMA4_ROPE, "embedding_length_per_layer_input": 0},
            **{"attention.shared_kv_layers": 0, "attention.head_count_kv": [2, 1, 2, 1]},
            "expert_feed_forward_length": 32,
        },
    ),
    "llama4": (
        "llama4",
        lambda t: t.Llama4TextConfig(
            **FOUR,
            head_dim=32,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            rope_parameters=LLAMA4_ROPE,
        ),
        {
            **{"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 128},
            **{"feed_forward_length": 96, "interleave_moe_layer_step": 2, "extra": OF_LLAMA4_ROPE},
        },
    ),
}


def kinds(name: str) -> str:
    return "Q8_0"


def make(name: str, folder: Path, models: dict | None = None, **more: object) -> tuple[Path, Path]:
    """Return the checkpoint of a model, and its GGUF file with `more` metadata."""
    architecture, config, values = (models or MODELS)[name]
    source = save_ternary(config(transformers), folder / name)
    return source, convert(source, architecture, kinds, **{**values, **more})
