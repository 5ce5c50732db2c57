"""Checkpoints of benchmarks whose layers keep recurrent states or attend over latents, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpcdecode.bench.workload import BOS, EOS, PAD, made, write_tokenizer

_VOCABULARY = 16_000
_COMMON = {
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
    """A config of transformers, by its class and what differs from `_COMMON`."""

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


def mixed_checkpoint(work: Path, name: str) -> Path:
    """Return the directory of MIXED[name] under `work`, with random bfloat16 weights and a tokenizer; make it once."""
    return made(work / f"mixed-{name}", lambda folder: _write(folder, MIXED[name]))


def _write(folder: Path, mixed: MixedModel) -> None:
    import torch
    import transformers

    config = getattr(transformers, mixed.config)(**{**_COMMON, **mixed.sizes})
    torch.manual_seed(0)
    make: Callable[..., torch.nn.Module] = transformers.AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]  # a model of transformers
    write_tokenizer(folder, _VOCABULARY)
