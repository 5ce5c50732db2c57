"""Small configs of models some or all of whose layers keep recurrent states."""

from __future__ import annotations

from collections.abc import Callable

import transformers
from transformers import PreTrainedConfig

COMMON = dict(vocab_size=512, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1)
HEADS = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
SHAPE = dict(**COMMON, **HEADS, intermediate_size=128)
LINEAR = ["linear_attention", "linear_attention", "full_attention"]
SHORT = ["conv", "full_attention", "conv"]
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHARED = dict(**EXPERTS, shared_expert_intermediate_size=32)
GATED_DELTA = dict(
    num_hidden_layers=3,
    layer_types=LINEAR,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
)
QSA = dict(  # indexers that choose all of the tokens of any sequence here
    indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=1024, indexer_compress_ratio=16
)
NGRAMS = dict(
    heads_per_ngram=2, ngram_vocab_size_base=97, make_ngram_vocab_size_divisible_by=8, seed=5, split_ngram_parts=2
)
MAMBA2 = dict(
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=32,
)
LATENT = dict(kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
MAMBA = dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, bos_token_id=0, eos_token_id=1, pad_token_id=1)


def _make(kind: str, **values) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, f"{kind}Config")(**values)


HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": _make("Qwen3Next", **SHAPE, **GATED_DELTA, **SHARED, head_dim=32),
    "qwen3_5": _make("Qwen3_5Text", **SHAPE, **GATED_DELTA, head_dim=32),
    "qwen3_5_moe": _make("Qwen3_5MoeText", **SHAPE, **GATED_DELTA, **SHARED, head_dim=32),
    "qwen4_exp_text": _make(  # with embeddings of several tokens in two layers
        "Qwen4ExpText",
        **{**SHAPE, "eos_token_id": [7, 1]},
        **{**GATED_DELTA, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"]},
        **{**SHARED, "head_dim": 16, "hc_count": 2, "hc_lowrank": 8, **QSA, **NGRAMS, "ple_layer_ids": [1, 3]},
    ),
    "olmo_hybrid": _make("OlmoHybrid", **SHAPE, **{**GATED_DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": _make(
        "KimiLinear",
        **{**SHAPE, "num_key_value_heads": 4},
        **LATENT,
        num_hidden_layers=3,
        layer_types=LINEAR,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        linear_head_dim=16,
        linear_num_heads=4,
    ),
    "granitemoehybrid": _make(
        "GraniteMoeHybrid",
        **SHAPE,
        **{**MAMBA2, "mamba_n_groups": 1},
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "nemotron_h": _make(
        "NemotronH",
        **SHAPE,
        head_dim=16,
        layers_block_type=["mamba", "mlp", "attention", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        conv_kernel=4,
        chunk_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "falcon_h1": _make("FalconH1", **SHAPE, **MAMBA2, num_hidden_layers=2, mamba_d_ssm=128, head_dim=16),
    "bamba": _make("Bamba", **SHAPE, **MAMBA2, num_hidden_layers=3, attn_layer_indices=[1]),
    "zamba2": _make(
        "Zamba2",
        **{**SHAPE, "num_key_value_heads": 4},
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_ngroups=2,
        n_mamba_heads=8,
        num_mem_blocks=1,
        adapter_rank=8,
        chunk_size=32,
    ),
    "jamba": _make(
        "Jamba",
        **SHAPE,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
    ),
    "lfm2": _make("Lfm2", **SHAPE, num_hidden_layers=3, layer_types=SHORT, conv_L_cache=3, block_ff_dim=128),
    "lfm2_moe": _make(
        "Lfm2Moe", **SHAPE, **EXPERTS, num_hidden_layers=3, layer_types=SHORT, conv_L_cache=3, num_dense_layers=1
    ),
    "mamba2": _make("Mamba2", **MAMBA, num_heads=8, head_dim=16, n_groups=2, state_size=16, chunk_size=32),
    "mamba": _make("Mamba", **MAMBA, state_size=8, intermediate_size=128),
    "falcon_mamba": _make("FalconMamba", **MAMBA, state_size=8),
}
