"""Configs of models whose scores have biases by distance, and of others that bypass the attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

IDS = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
_INKLING: dict[str, Any] = {
    **IDS,
    **_HEADS,
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "sliding_window_size": 40},
    **{"d_rel": 4, "rel_extent": 48, "log_scaling_n_floor": 64, "max_position_embeddings": 1024},
    **{"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"],
    "num_hidden_layers": 5,
}


def _of(model_type: str, **values: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: CONFIG_MAPPING[model_type](**values)


def _falcon(**values: Any) -> Callable[[], PreTrainedConfig]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return lambda: transformers.FalconConfig(**{**IDS, **sizes, **values})


BIASED: dict[str, Callable[[], PreTrainedConfig]] = {
    "inkling": _of(
        "inkling_text",
        **_INKLING,
        mlp_layer_types=["dense", *4 * ["sparse"]],
        intermediate_size=96,
        n_shared_experts=2,
    ),
    "inkling2": _of(
        "inkling2_text",
        **_INKLING,
        unpadded_vocab_size=512,
        n_layers_per_attn_res_block=2,
        qk_l2_clip_threshold=4.0,
        rel_l2_clip_threshold=2.0,
    ),
    "inkling2_loop": _of(
        "inkling2_loop_text",
        **{**_INKLING, "num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
        **{"unpadded_vocab_size": 512, "n_layers_per_attn_res_block": 1},
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_gate_rank": 8},
    ),
    "bloom": _of("bloom", **IDS, hidden_size=64, n_layer=3, n_head=4),
    "mpt": _of("mpt", **IDS, d_model=64, n_layers=3, n_heads=4, max_seq_len=1024),
    "falcon_alibi": _falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
}
BYPASSING: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon": _falcon(),
    "falcon_groups": _falcon(num_kv_heads=2, new_decoder_architecture=True),
    "gpt_neo": _of(
        "gpt_neo",
        **IDS,
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=24,
        max_position_embeddings=1024,
    ),
}
