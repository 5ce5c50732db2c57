"""Models whose config.json is as their makers released it, with keys of older releases of transformers, run as theirs.

Sizes are small and weights random; the tokenizer is the demo model's, under the class that most releases state.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.model import load_split
from tests.support.steps import Attention, step

DEMO = Path(__file__).parents[2] / "jobs" / "demo" / "model"
COMMON = dict(
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=1,
    torch_dtype="bfloat16",
    transformers_version="4.42.3",
    use_cache=True,
    hidden_act="silu",
    max_position_embeddings=131072,
    rope_theta=500000.0,
)
LLAMA3 = dict(factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192)
DEEPSEEK = dict(
    num_key_value_heads=4,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    n_shared_experts=1,
    moe_intermediate_size=32,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    ep_size=1,
    n_group=2,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    num_nextn_predict_layers=1,
    rope_scaling=dict(
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
        type="yarn",
    ),
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
)
DEEPSEEK_V4 = dict(
    num_hidden_layers=4,
    num_key_value_heads=1,
    attention_bias=False,
    attention_dropout=0.0,
    compress_ratios=[0, 4, 128, 4, 0],  # the last of the layer that predicts
    compress_rope_theta=160000,
    expert_dtype="fp8",
    hc_eps=1e-6,
    hc_mult=4,
    hc_sinkhorn_iters=3,
    head_dim=32,
    index_head_dim=16,
    index_n_heads=8,
    index_topk=4,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=2,
    num_hash_layers=1,
    num_nextn_predict_layers=1,
    o_groups=2,
    o_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    rms_norm_eps=1e-6,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=16, original_max_position_embeddings=65536, type="yarn"),
    rope_theta=10000,
    routed_scaling_factor=1.5,
    scoring_func="sqrtsoftplus",
    sliding_window=16,
    swiglu_limit=10.0,
    tie_word_embeddings=False,
    topk_method="noaux_tc",
)
GPT_OSS = dict(
    attention_bias=True,
    experts_per_token=2,
    head_dim=32,
    initial_context_length=4096,
    layer_types=["sliding_attention", "full_attention"],
    num_experts_per_tok=2,
    num_local_experts=4,
    output_router_logits=False,
    pad_token_id=2,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    sliding_window=16,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
)
GEMMA3_TEXT = dict(
    model_type="gemma3_text",
    rope_scaling={"factor": 8.0, "rope_type": "linear"},
    sliding_window=16,
    sliding_window_pattern=2,
    head_dim=32,
    query_pre_attn_scalar=32,
)
SIGLIP = dict(
    model_type="siglip_vision_model",
    hidden_size=32,
    image_size=28,
    intermediate_size=64,
    num_attention_heads=2,
    num_hidden_layers=1,
    patch_size=14,
    vision_use_head=False,
)
CONFIGS = {
    "Llama 3.1": dict(
        **COMMON,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        rope_scaling={**LLAMA3, "rope_type": "llama3"},
        mlp_bias=False,
        pretraining_tp=1,
    ),
    "Qwen2.5 with YaRN": dict(
        **COMMON,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        rope_scaling=dict(factor=4.0, original_max_position_embeddings=32768, type="yarn"),
        max_window_layers=28,
        sliding_window=131072,
        use_sliding_window=False,
    ),
    "DeepSeek-V3": {**COMMON, **DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "Kimi-K2": {**COMMON, **DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
    "DeepSeek-V4": {**COMMON, **DEEPSEEK_V4, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
    "gpt-oss": dict(**COMMON, **GPT_OSS, architectures=["GptOssForCausalLM"], model_type="gpt_oss"),
    "Gemma 3 4B": dict(
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        boi_token_index=5,
        eoi_token_index=6,
        image_token_index=7,
        mm_tokens_per_image=4,
        eos_token_id=[1, 2],
        text_config={**COMMON, **GEMMA3_TEXT},
        vision_config=SIGLIP,
    ),
}
IDS = [7 * i % 480 + 20 for i in range(40)]


def write(folder: Path, stated: dict) -> torch.nn.Module:
    """Write a model directory as released, with random weights, and return transformers' model of it."""
    for file in DEMO.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    kind = getattr(transformers, stated["architectures"][0])
    torch.manual_seed(0)
    own = {k: v for k, v in stated.items() if k not in ("architectures", "model_type", "auto_map", "torch_dtype")}
    model = kind._from_config(kind.config_class(**own)).float().eval()
    model.save_pretrained(folder / "saved")
    shutil.move(folder / "saved" / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(stated))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_as_released(name, tmp_path):
    theirs = write(tmp_path, CONFIGS[name])
    assert Tokenizer.load(tmp_path).encode_texts(["def f(x):"])[0]
    with torch.no_grad():
        wanted = theirs(torch.tensor([IDS])).logits[0]
    model = load_split(tmp_path, dtype="float32")
    found = step(model, Attention(model), [(0, i, token) for i, token in enumerate(IDS)], list(range(len(IDS))))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * max(float(wanted.std()), 1.0))
