"""GGUF files of architectures whose metadata transformers cannot read give the logits of the checkpoint."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.config import read_config
from hpcdecode.model.frontend.gguf.config import stated_by
from hpcdecode.model.frontend.gguf.tensors import read_headers
from hpcdecode.model.run.load import ModelPart
from tests.model.test_gguf import IDS, close, logits, projections, theirs
from tests.model.test_gguf_packed import expanded
from tests.support.gguf_converted import as_it_is, convert, save_ternary
from tests.support.models import EXPERTS, LATENT, SHAPE, YARN_ROPE
from tests.support.quantised import forms

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


def kinds(name):
    return "Q8_0"


def expected(source):
    return theirs(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))


def make(name, folder, **more):
    architecture, config, values = MODELS[name]
    source = save_ternary(config(transformers), folder / name)
    return source, convert(source, architecture, kinds, **{**values, **more})


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture(name, tmp_path):
    source, file = make(name, tmp_path)
    whole = logits(file)
    close(whole, expected(source))
    assert whole.std() > 0.1
    assert torch.equal(logits(file, quantised="auto"), whole)
    assert "Q8_0" in forms(load_split(file, dtype="float32", quantised="auto"))


@pytest.mark.parametrize("name", ["deepseek_v3", "granite_moe"])
@pytest.mark.parametrize("ep", [False, True])
def test_members_have_the_parts_that_they_have_of_the_checkpoint(name, ep, tmp_path):
    """Of numbers to the bit, and of blocks what they expand to."""
    source, file = make(name, tmp_path)
    for member in range(2):
        part = ModelPart(2, member, ep=ep)
        found, plain = (load_split(path, dtype="float32", quantised=None, part=part) for path in (file, source))
        for own, other in zip(*(projections(model) for model in (found, plain)), strict=True):
            assert torch.equal(own, other)
        kept = load_split(file, dtype="float32", quantised="auto", part=part)
        assert "Q8_0" in forms(kept) and expanded(kept) == expanded(found)


def test_a_latent_in_one_tensor(tmp_path):
    """As older converters wrote it, which stated the sizes of K and V of a head."""
    architecture, config, values = MODELS["deepseek_v3"]
    source = save_ternary(config(transformers), tmp_path / "source")
    old = {"attention.head_count_kv": 4, "attention.key_length": 24, "attention.value_length": 20}
    old |= {"attention.key_length_mla": None, "attention.value_length_mla": None}
    close(logits(convert(source, architecture, kinds, as_it_is, **{**values, **old})), expected(source))


def test_groups_of_released_models_that_older_files_do_not_state(tmp_path):
    """Of 256 experts DeepSeek-V3 chooses among those of four groups of eight."""
    architecture, _, values = MODELS["deepseek_v3"]
    config = transformers.DeepseekV3Config(
        **{**LATENT, "n_routed_experts": 256, "moe_intermediate_size": 32}, n_group=8, topk_group=4
    )
    source = save_ternary(config, tmp_path / "source")
    more = {"expert_count": 256, "expert_group_count": None, "expert_group_used_count": None}
    more |= {key: None for key in YARN}
    file = convert(source, architecture, kinds, **{**values, **more})
    assert (read_config(file).n_group, read_config(file).topk_group) == (8, 4)


def test_layers_that_predict_later_tokens_are_left_out(tmp_path):
    """Here the last layer is one."""
    architecture, config, values = MODELS["glm4_moe"]
    source = save_ternary(config(transformers), tmp_path / "source")
    file = convert(source, architecture, kinds, **{**values, "block_count": 3})
    assert read_config(file).num_hidden_layers == 2
    assert logits(file).shape == (len(IDS), SHAPE["vocab_size"])


REFUSED = {  # of architectures metadata that they cannot have
    "unknown": ("smollm3", {"rope.new": 1}, r"no metadata 'rope\.new', whose meaning"),
    "a rotated part": ("smollm3", {"rope.dimension_count": 8}, r"16 of rope\.dimension_count, got 8"),
    "two sizes of heads": ("exaone4", {"attention.value_length": 16}, r"32 of attention\.value_length, got 16"),
    "scores": ("glm4_moe", {"expert_gating_func": 1}, r"2 of expert_gating_func, got 1"),
    "scores of V2": ("deepseek_v2", {"expert_gating_func": 2}, r"1 of expert_gating_func, got 2"),
    "no sizes": ("deepseek_v3", {"attention.key_length_mla": None}, r"above 0 of attention\.key_length_mla, got None"),
    "all layers predict": ("glm4_moe", {"nextn_predict_layers": 4}, r"fewer than 4 layers of nextn_predict_layers"),
    "not rotated": ("granite", {"rope.scaling.finetuned": False}, r"True of rope\.scaling\.finetuned, got False"),
    "a scale alone": ("mistral3", {"attention.temperature_scale": 0.1}, "beside rotary frequencies scaled by yarn"),
    "two sizes in a kind": ("gemma4_moe", {"attention.head_count_kv": [2, 1, 1, 1]}, r"for layers of one kind, got"),
    "frequencies": ("gemma4", {"extra": {"rope_freqs.weight": torch.ones(16) * 2}}, "that are 1 or more than"),
    "a window": ("llama4", {"attention.sliding_window": 0}, r"no value of attention\.sliding_window, got 0"),
    "a pattern": ("olmo3", {"attention.sliding_window_pattern": [True]}, r"4 values of attention\.sliding_window_pat"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_understood(name, tmp_path):
    model, more, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        load_split(make(model, tmp_path, **more)[1], dtype="float32")


@pytest.mark.parametrize("name", ["deepseek_v3", "olmo3", "gemma4", "ministral3", "llama4"])
def test_hostile_metadata_ends_in_a_config_or_an_error(name, tmp_path):
    (header,) = read_headers([make(name, tmp_path)[1]])
    refused = 0
    for key in [key for key in header.values if key.startswith(f"{MODELS[name][0]}.")]:
        for value in ("x", 0, -1, 1 << 40, float("nan"), [0], ["a"], [True] * 3):
            try:
                stated_by([header._replace(values={**header.values, key: value})])
            except UserError:
                refused += 1
    assert refused > 20


def test_tensors_that_do_not_fit(tmp_path):
    _, file = make("deepseek_v3", tmp_path)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.1.attn_v_b.weight", b"blk.9.attn_v_b.weight"))
    with pytest.raises(UserError, match=r"expected tensors 'blk\.1\.attn_k_b\.weight' and 'blk\.1\.attn_v_b\.weight'"):
        load_split(file, dtype="float32")
    file.write_bytes(content.replace(b"blk.1.attn_q_b.weight", b"blk.1.attn_q_b.bias\0\0"))
    with pytest.raises(UserError, match="attn_q_b"):
        load_split(file, dtype="float32")
