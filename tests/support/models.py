"""Small random checkpoints in Hugging Face format, one per architecture, and a plain way to run them split."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from hpcdecode.model.frontend.architectures import model_class
from tests.support.biased import BIASED, BYPASSING
from tests.support.hybrids import HYBRIDS
from tests.support.tiny import tiny

Model = TypeVar("Model", bound=torch.nn.Module)
VOCAB, POSITIONS, WINDOW = 512, 1024, 96
BOS, EOS = 0, 1
COMMON = dict(vocab_size=VOCAB, max_position_embeddings=POSITIONS, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS)
HEADS = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
SHAPE = dict(**COMMON, **HEADS, intermediate_size=128, num_hidden_layers=3)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(
    **{**SHAPE, "num_key_value_heads": 4, "num_hidden_layers": 2},
    **EXPERTS,
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
    tie_word_embeddings=False,
)
DENSE_LATENT = (*SHAPE, "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _make(kind: str, **values) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, f"{kind}Config")(**values)


def _changed(make: Callable[[], PreTrainedConfig], **values) -> Callable[[], PreTrainedConfig]:
    def changed() -> PreTrainedConfig:
        config = make()
        for name, value in values.items():
            setattr(config, name, value)
        return config

    return changed


LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)
YARN_ROPE = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=256,
)

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "opt": _make(
        "OPT", **COMMON, hidden_size=64, ffn_dim=128, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64
    ),
    "gpt2": _make(
        "GPT2",
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=64,
        n_layer=3,
        n_head=4,
        bos_token_id=BOS,
        eos_token_id=EOS,
    ),
    "llama2": _make("Llama", **{**SHAPE, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "llama3": _make("Llama", **SHAPE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral": _make("Mistral", **SHAPE, sliding_window=WINDOW, head_dim=24),
    "qwen2": _make(
        "Qwen2", **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": _make("Qwen3", **SHAPE, head_dim=32, tie_word_embeddings=False),
    "gemma2": _make(
        "Gemma2", **SHAPE, head_dim=24, sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=5.0
    ),
    "gemma3": _make(
        "Gemma3Text", **SHAPE, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=32, layer_types=MIXED
    ),
    "phi3": _make("Phi3", **SHAPE, sliding_window=WINDOW, tie_word_embeddings=False),
    "mixtral": _make("Mixtral", **SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _make(
        "Qwen3Moe", **SHAPE, **EXPERTS, head_dim=16, num_experts=8, mlp_only_layers=[1], norm_topk_prob=True
    ),
    "gpt_oss": _make(
        "GptOss",
        **SHAPE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=MIXED,
    ),
    "deepseek_v2": _make("DeepseekV2", **LATENT, n_group=2, topk_group=1, topk_method="group_limited_greedy"),
    "deepseek_v3": _make("DeepseekV3", **LATENT, n_group=2, topk_group=1, rope_parameters=YARN_ROPE),
    "glm4_moe_lite": _make("Glm4MoeLite", **LATENT, n_group=1, topk_group=1),
    "minicpm3": _make("MiniCPM3", **{k: v for k, v in LATENT.items() if k in DENSE_LATENT}),
}

# Indexers choose 40 tokens. With 16 heads hardly any tokens have equal scores, 0 of all heads, among which
# transformers chooses as it happens.
INDEXER = dict(index_topk=40, index_n_heads=16, index_head_dim=16)
POOLS = dict(  # of 4 tokens, of which 10 are chosen; layers with states beside
    **{"index_topk": 40, "index_kpool": 4, "index_n_heads": 16, "kv_lora_rank": 24, "num_hidden_layers": 5},
    layer_types=["linear_attention", *2 * ["indexed_attention"], "linear_attention", "indexed_attention"],
    indexer_types=["full", "full", "shared", "full", "full"],
    mlp_layer_types=[*2 * ["dense"], *3 * ["sparse"]],
)
BLOCKS = dict(  # of 16 tokens, of which each of two KV heads chooses 2 beside the last one
    **{**SHAPE, "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"index_block_size": 16, "index_topk_blocks": 3, "index_n_heads": 2, "index_head_dim": 16},
    layer_types=["full_attention", *2 * ["minimax_m3_sparse"], "full_attention"],
)
INDEXED = {
    "deepseek_v32": _make("DeepseekV32", **LATENT, **INDEXER, n_group=2, topk_group=1),
    "glm_moe_dsa": _make(
        "GlmMoeDsa",
        **{**LATENT, "num_hidden_layers": 4},
        **INDEXER,
        n_group=1,
        topk_group=1,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "deepseek_v4": lambda: tiny("deepseek_v4"),  # whose indexers choose compressed entries
    "glm5_next": lambda: tiny("glm5_next", **POOLS),
    "minimax_m3": _make("MiniMaxM3VLText", **BLOCKS),
    "qwen4": _changed(  # of 5 pools of 8 tokens, for both KV heads; with embeddings of several tokens
        HYBRIDS["qwen4_exp_text"], indexer_n_heads=16, indexer_budget=40, indexer_compress_ratio=8
    ),
}


def build(name: str, directory: str | Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint of an architecture or hybrid to `directory`: config, weights, tokenizer."""
    return save((ARCHITECTURES | HYBRIDS | INDEXED | BIASED | BYPASSING)[name](), directory, seed, dtype)


def save(
    config: PreTrainedConfig, directory: str | Path, seed: int = 0, dtype: torch.dtype = torch.float32, **options
) -> Path:
    directory = Path(directory)
    model = random_model(lambda: model_class(config)._from_config(config, dtype=torch.float32), seed)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS)
    model.to(dtype).save_pretrained(directory, **options)
    tokenizer().save_pretrained(directory)
    return directory


def random_model(make: Callable[[], Model], seed: int) -> Model:
    """Return the model that `make` makes, with weights that depend on nothing but `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
    _randomise(model, seed)
    return model


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Set weights that keep activations near unit size, so that greedy tokens vary; to some add to what they are."""
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    for name, weight in model.state_dict(keep_vars=True).items():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("tid2eid"):  # each token's experts
            weight.copy_(noise.argsort(-1) + torch.arange(len(weight))[:, None] % 7)
        if not weight.is_floating_point() or name.endswith(("slope_rate", "_decay")):
            continue  # a table of indices; what is derived from other values
        if weight is embedding:
            weight.copy_(noise * (0.15 if hasattr(model.get_input_embeddings(), "scalar_embed_scale") else 0.3))
        elif "wpe" in name or "embed_positions" in name:
            weight.copy_(noise)  # as large as what the layers add, lest greedy decoding falls into a loop
        elif weight.ndim < 2 and name.endswith("weight") and not any(part.isdigit() for part in name.split(".")):
            weight.add_(noise - 1)  # the last norm: signs at random, so that a tied head does not repeat its input
        elif weight.ndim < 2:
            weight.add_(noise * (1.0 if name.endswith("sinks") else 0.1))
        else:
            transposed = "experts" in name and getattr(
                model.get_submodule(name.rpartition(".")[0]), "is_transposed", False
            )
            weight.copy_(noise * weight.shape[-2 if transposed else -1] ** -0.5)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most VOCAB tokens, trained on text that comes with Python."""
    import argparse
    import textwrap

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator([inspect.getsource(argparse), inspect.getsource(textwrap)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:"
    )
    return fast
