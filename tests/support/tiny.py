"""Tiny configs of any model type of transformers: its defaults, with few and small layers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, POSITIONS, LAYERS = 512, 1024, 3
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "projection_dim", "text_hidden_size"), 64),
    **dict.fromkeys(("out_hidden_size", "projector_hidden_size", "mm_hidden_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), LAYERS),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 24),
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "sliding_window": 96,
    "n_group": 2,
    "topk_group": 1,
    "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1,
    "image_size": 32,
    "patch_size": 8,
    "num_kv_shared_layers": 1,
    "hc_sinkhorn_iters": 3,
}
UNSET = ("num_experts_per_tok", "n_routed_experts")  # by default, of types that need them
_QSA = {  # indexers of Qwen4, and its residual streams
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 256},
    **{"indexer_compress_ratio": 16, "hc_lowrank": 8},
}
_OF_LAYERS = {  # rotary embeddings in one kind of layer alone
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "full_attention": None,
    },
}
_LOOP = {  # the middle ones of six layers run three times
    **{"unpadded_vocab_size": 500, "num_hidden_layers": 6, "n_layers_per_attn_res_block": 2},
    **{"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_gate_rank": 8},
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
}
_AUDIO = {"encoder_attention_heads": 4, "encoder_ffn_dim": 96, "encoder_layers": 2, "output_dim": 64}
OF_TYPES: dict[str, dict[str, Any]] = {  # that these need beside, also in the configs within them
    "cohere_compass": {"text_config": _OF_LAYERS},
    "dots1": {"n_shared_experts": 1},
    "dory": {
        **{"num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2},
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "full_attention", "mlp"],
    },
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [3, 3, 2]}}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "glm5_next": {
        "text_config": {
            **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 0),
            **dict.fromkeys(("qk_head_dim", "linear_head_dim", "index_head_dim"), 16),
            **{"linear_num_heads": 4, "index_n_heads": 2},
        }
    },
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 1]], "spatial_target_layers": []},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": {"mrope_section": [2, 2, 2, 2]}}},
    "hy_v4_vl": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "inkling2_text": {"unpadded_vocab_size": 500},
    "inkling2": {"text_config": {"unpadded_vocab_size": 500}},
    "inkling2_loop_text": _LOOP,
    "inkling2_loop": {"text_config": _LOOP},
    "longcat_flash": {"qk_head_dim": 24, "num_key_value_heads": 4, "zero_expert_num": 4},
    "ministral": {"head_dim": 16},
    "mistral4": {"head_dim": 24, "qk_head_dim": 24, "rope_parameters": {"partial_rotary_factor": 1 / 3}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_5_omni_thinker": {"audio_config": _AUDIO},
    "qwen3_omni_moe_thinker": {"audio_config": _AUDIO},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "step3p7": {"text_config": {"sliding_window": 96}},
    "xlnet": {"d_head": 16},
    "zaya": {"num_experts_per_tok": 1},
}
_WIDTHS = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": POSITIONS}
MADE: dict[str, dict[str, Any]] = {  # arguments of configs whose dictionary names or derives other values
    "bailing_hybrid": {
        **_WIDTHS,
        **{"num_hidden_layers": LAYERS, "layer_group_size": 3, "first_k_dense_replace": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 24},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32},
        **{"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "num_local_experts": 8},
        **{"pad_token_id": 0, "eos_token_id": 2},
    },
    "cohere_compass_text": {
        **_WIDTHS,
        **_OF_LAYERS,
        **{"num_hidden_layers": LAYERS, "sliding_window": 96, "eos_token_id": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "deepseek_v4": {  # three kinds of layers, of which two have entries; 8 of up to 32 are chosen
        **{"vocab_size": VOCAB, "hidden_size": 64, "moe_intermediate_size": 32, "max_position_embeddings": POSITIONS},
        **{"num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 24, "sliding_window": 24},
        "layer_types": ["sliding_attention", *2 * ["compressed_sparse_attention", "heavily_compressed_attention"]],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        **{"num_experts_per_tok": 2, "n_routed_experts": 8, "num_hash_layers": 2, "qk_rope_head_dim": 8},
        **{"hc_mult": 2, "hc_sinkhorn_iters": 3, "o_groups": 2, "o_lora_rank": 16},
        **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8, "pad_token_id": 1, "eos_token_id": 1},
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    },
    "dbrx": {
        **{"d_model": 64, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": POSITIONS, "vocab_size": VOCAB},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "zamba2": {
        **_WIDTHS,
        **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
        **{"n_mamba_heads": 8, "num_attention_heads": 4, "mamba_d_state": 16, "chunk_size": 32},
        **{"use_mem_rope": True, "adapter_rank": 8, "use_mamba_kernels": False},
    },
}
DEEP = ("deepstack_visual_indexes", "fullatt_block_indexes", "vision_feature_layer", "feature_layer")


def tiny(model_type: str, **text: Any) -> PreTrainedConfig:
    """Return the default config of `model_type`, shrunken; text: values for its language model."""
    kind = CONFIG_MAPPING[model_type]
    if model_type in MADE:
        return kind(**{**MADE[model_type], **text})
    given = _merged(_small(kind().to_dict()), OF_TYPES.get(model_type, {}))
    given.get("text_config", given).update(text)
    return kind(**given)


def _merged(given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with the values of `more`, also in the dictionaries within."""
    both = {k: _merged(given.get(k) or {}, v) if isinstance(v, dict) else v for k, v in more.items()}
    return {**given, **both}


def _small(given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config, and of the configs in it, with small sizes."""
    layers = next((given[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in given), None)
    own = {}
    for key, value in given.items():
        if key == "per_layer_config":
            continue  # of layers that are left out; the model has defaults
        elif isinstance(value, dict) and (key.endswith("_config") or key in ("decoder", "encoder")):
            own[key] = _small(value)
        elif key in UNSET or (isinstance(value, int) and type(value) is not bool and key in SIZES):
            own[key] = SIZES[key]
            if key == "num_key_value_heads" and value == given.get("num_attention_heads"):
                own[key] = SIZES["num_attention_heads"]
        elif isinstance(value, int) and key.endswith(("_token_id", "_token_index")):
            own[key] = value % 64 + VOCAB - 64 if value >= 64 else value
        elif isinstance(value, list) and key == "eos_token_id":
            own[key] = [each % VOCAB for each in value]
        elif isinstance(value, list) and layers and len(value) == layers and layers > LAYERS:
            own[key] = _some(value)
        elif key in DEEP and isinstance(value, list):
            own[key] = [0]
        elif isinstance(value, dict) and "rope_theta" in value:
            own[key] = {**value, "rope_theta": value["rope_theta"] or 1e4}
            own[key]["mrope_section"] = [2, 3, 3]  # of 8 frequencies; most types ignore it
        else:
            own[key] = value
    if "qk_rope_head_dim" in own and "head_dim" in own:
        own["head_dim"] = own["qk_rope_head_dim"]
    return own


def _some(values: list[Any]) -> list[Any]:
    """Return LAYERS of a list with a value a layer, each kind of value if there are so few."""
    kinds = [value for i, value in enumerate(values) if value not in values[:i]]
    return (kinds + values)[:LAYERS]
