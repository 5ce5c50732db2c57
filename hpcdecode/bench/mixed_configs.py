"""Configs of models of benchmarks whose layers keep recurrent states, attend over latents, or have experts."""

from __future__ import annotations

from typing import Any, NamedTuple

from hpcdecode.bench.workload import BOS, EOS, PAD

_VOCABULARY = 16_000
COMMON = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}


class MixedModel(NamedTuple):
    """A config of transformers, by its class and what differs from `COMMON`."""

    config: str
    sizes: dict[str, Any]


MIXED = {
    "hybrid": MixedModel(  # three of four layers by the gated delta rule, as in Qwen3.5
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 12,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "latent": MixedModel(  # as DeepSeek-V3, without experts
        "DeepseekV3Config",
        {
            "num_hidden_layers": 12,
            "first_k_dense_replace": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    ),
    "granite-4-h": MixedModel(  # 12 of the layers of Granite 4.0 H 1B: Mamba-2, and 2 with attention
        "GraniteMoeHybridConfig",
        {
            "vocab_size": 32_000,
            "hidden_size": 1536,
            "intermediate_size": 4096,
            "shared_intermediate_size": 4096,
            "num_hidden_layers": 12,
            "layer_types": (["mamba"] * 5 + ["attention"]) * 2,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "position_embedding_type": "nope",
            "attention_multiplier": 1 / 128,
        },
    ),
    "deepseek-v2": MixedModel(  # 8 of the layers of DeepSeek-V2 Lite, with a plain MLP in place of experts
        "DeepseekV2Config",
        {
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 8,
            "first_k_dense_replace": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
    "qwen3.5": MixedModel(  # 12 of the layers of Qwen3.5 0.8B: the gated delta rule, and 3 with attention
        "Qwen3_5TextConfig",
        {
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 12,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "glm-4.7-flash": MixedModel(  # 8 layers as wide as those of GLM-4.7-Flash; without experts a DeepSeek-V3, which
        "DeepseekV3Config",  # vLLM and llama.cpp run, too
        {
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 8,
            "first_k_dense_replace": 8,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
        },
    ),
    "states": MixedModel(  # states alone
        "Mamba2Config",
        {
            "num_hidden_layers": 12,
            "num_heads": 16,
            "head_dim": 64,
            "expand": 2,
            "n_groups": 1,
            "state_size": 128,
            "chunk_size": 64,
        },
    ),
}

WITH_EXPERTS = {  # few of the layers of models whose MLPs are experts
    "granite-4-h-tiny": MixedModel(
        "GraniteMoeHybridConfig",
        {
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 6,
            "layer_types": ["mamba"] * 5 + ["attention"],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "position_embedding_type": "nope",
            "attention_multiplier": 1 / 128,
        },
    ),
    "deepseek-v2-lite": MixedModel(
        "DeepseekV2Config",
        {
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "topk_method": "greedy",
        },
    ),
}
