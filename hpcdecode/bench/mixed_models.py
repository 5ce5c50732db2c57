"""Checkpoints of benchmarks whose layers keep recurrent states or attend over latents, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hpcdecode.attention.shapes import MixerShape, state_bytes
from hpcdecode.bench.workload import BOS, EOS, PAD, Shape, made, shape_of, write_tokenizer
from hpcdecode.planning.layer_work import attend_flop, kv_bytes
from hpcdecode.planning.model_size import ModelSize

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


@dataclass(frozen=True)
class MixedShape(Shape):
    """Sizes of a model of MIXED, whose layers are not all alike.

    Attributes:
        matrices: (inputs, outputs) of the projections of all layers.
        weights: Bytes of all weights.
        kept: What a sequence keeps at each layer.
    """

    matrices: tuple[tuple[int, int], ...] = ()
    weights: int = 0
    kept: tuple[MixerShape, ...] = ()

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of the projections of all layers."""
        return list(self.matrices)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the whole model."""
        return self.weights

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of K and V, or of the latents, of one token, all layers, bfloat16."""
        return int(kv_bytes(self.kept, "bfloat16"))

    @property
    def pair_flop(self) -> int:
        """Return the FLOP of a query and a key, all heads and layers, in the form that decode attention has."""
        return int(attend_flop(self.kept))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a sequence's states, float32."""
        return state_bytes(self.kept)


def products_of(name: str) -> Shape:
    """Return the shape of a name in MIXED, without what sequences keep, or that of another model."""
    if name not in MIXED:
        return shape_of(name)
    import torch

    with torch.device("meta"):
        model = _made(MIXED[name])
    named = dict(model.named_parameters())
    outer = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    matrices = tuple((p.shape[1], p.shape[0]) for p in named.values() if p.dim() == 2 and id(p) not in outer)
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    weights = sum(2 * p.numel() for p in named.values())
    return MixedShape(hidden, 1, 1, 1, 0, vocabulary, matrices=matrices, weights=weights)


def touched_bytes(name: str, rows: int) -> float:
    """Return the bytes of the weights, in bfloat16, that a decode step of some rows reads, if choices are independent.

    Of an embedding it reads but a row for each.
    """
    import torch

    with torch.device("meta"):
        model = _made({**MIXED, **WITH_EXPERTS}[name])
    chosen = getattr(model.config, "num_experts_per_tok", 0)
    embedding, total = model.get_input_embeddings().weight, 0.0
    for weight in (p for p in model.parameters() if p is not embedding):
        stacked = weight.dim() == 3 and weight.shape[1] > 1
        share = 1 - (1 - chosen / len(weight)) ** rows if stacked else 1.0
        total += 2 * weight.numel() * share
    return total


@cache
def mixed_shape(name: str, directory: Path) -> MixedShape:
    """Return the shape of MIXED[name], whose checkpoint is in `directory`."""
    shape = products_of(name)
    assert isinstance(shape, MixedShape), "expected a model of MIXED"
    return replace(shape, kept=tuple(ModelSize.from_directory(str(directory)).shapes))


def mixed_checkpoint(work: Path, name: str) -> Path:
    """Return the directory of a model of MIXED or WITH_EXPERTS under `work`; make it once.

    Its weights are random, in bfloat16, and it has a tokenizer.
    """
    return made(work / f"mixed-{name}", lambda folder: _write(folder, {**MIXED, **WITH_EXPERTS}[name]))


def _made(mixed: MixedModel) -> Any:
    import torch
    import transformers

    config = getattr(transformers, mixed.config)(**{**_COMMON, **mixed.sizes})
    make: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config
    return make(config, dtype=torch.float32)


def _write(folder: Path, mixed: MixedModel) -> None:
    """Write a checkpoint whose matrices are random at 1/sqrt(inputs), so that most next tokens are no near ties."""
    import torch

    torch.manual_seed(0)
    model = _made(mixed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_()
            elif hasattr(module, "act_fn") or hasattr(module, "top_k"):  # experts, and what chooses them
                for weight in (p for p in module.parameters(recurse=False) if p.dim() > 1):
                    weight.normal_(std=weight.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
