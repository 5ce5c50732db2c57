"""GGUF files of models with recurrences give the logits of the checkpoint."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.gguf_logits import close, expected, logits
from tests.support.gguf_models import SCALED, SCALES, make
from tests.support.hybrids import GATED_DELTA, HYBRIDS, MAMBA, MAMBA2, SHAPE, SHARED
from tests.support.quantised import forms

GATED_DELTA = {**GATED_DELTA, "linear_num_value_heads": 6}
OF_DELTA = {
    **{"attention.recurrent_layers": [True, True, False], "full_attention_interval": 4, "rope.dimension_count": 8},
    **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6},
    "ssm.inner_size": 144,
}
OF_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
OF_SHARED = {**OF_EXPERTS, "expert_shared_feed_forward_length": 32}
SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}
OF_MAMBA = {
    **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 8},
    "ssm.inner_size": 128,
}
GRANITE = dict(**SHAPE, **{**MAMBA2, "mamba_n_groups": 1}, **SCALES, num_hidden_layers=3, shared_intermediate_size=64)
GRANITE["layer_types"] = ["mamba", "attention", "mamba"]
OF_GRANITE = {
    **{**OF_MAMBA, **SCALED, "ssm.group_count": 1, "rope.scaling.finetuned": False},
    **{"attention.head_count_kv": [0, 2, 0], "expert_shared_feed_forward_length": 64},
}
MULTIPLIERS = {
    **dict.fromkeys(("key_multiplier", "attention_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier"), 0.5),
    **dict.fromkeys(("attention_out_multiplier", "ssm_in_multiplier", "embedding_multiplier"), 2.0),
    **{"mlp_multipliers": [2.0, 0.5], "ssm_multipliers": [1.0, 2.0, 0.5, 2.0, 0.25]},
}
NORM = 1e-5
MODELS = {  # the name in GGUF, the config, and metadata that the writer does not take from it
    "qwen3_next": (
        "qwen3next",
        lambda t: t.Qwen3NextConfig(**SHAPE, **GATED_DELTA, **SHARED, head_dim=32),
        {**OF_DELTA, **OF_SHARED},
    ),
    "qwen3_5": ("qwen35", lambda t: t.Qwen3_5TextConfig(**SHAPE, **GATED_DELTA, head_dim=32), {**OF_DELTA, **SECTIONS}),
    "qwen3_5_moe": (
        "qwen35moe",
        lambda t: t.Qwen3_5MoeTextConfig(**SHAPE, **GATED_DELTA, **SHARED, head_dim=32),
        {**OF_DELTA, **OF_SHARED, **SECTIONS, "feed_forward_length": None},
    ),
    "granite_hybrid": (
        "granitehybrid",
        lambda t: t.GraniteMoeHybridConfig(**GRANITE, num_local_experts=4, num_experts_per_tok=2),
        {**OF_GRANITE, "expert_count": 4, "expert_used_count": 2},
    ),
    "granite_hybrid_dense": (
        "granitehybrid",
        lambda t: t.GraniteMoeHybridConfig(**GRANITE, num_local_experts=0, num_experts_per_tok=0),
        {**OF_GRANITE, "expert_count": 0, "expert_used_count": 0},
    ),
    "nemotron_h": (
        "nemotron_h_moe",
        lambda t: HYBRIDS["nemotron_h"](),
        {
            **{**OF_MAMBA, **OF_SHARED, "block_count": 4, "expert_shared_count": 1, "expert_weights_norm": True},
            **{"attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 0, 0, 32]},
            **{"rope.scaling.finetuned": False, "attention.layer_norm_epsilon": NORM, "rope.dimension_count": 16},
        },
    ),
    "falcon_h1": (
        "falcon-h1",
        lambda t: t.FalconH1Config(**SHAPE, **MAMBA2, **MULTIPLIERS, num_hidden_layers=2, mamba_d_ssm=128, head_dim=16),
        OF_MAMBA,
    ),
    "mamba2": (
        "mamba2",
        lambda t: t.Mamba2Config(**MAMBA, num_heads=8, head_dim=16, n_groups=2, state_size=16, chunk_size=32),
        {
            **{**OF_MAMBA, "context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0},
            **{"attention.head_count_kv": None, "attention.key_length": None, "attention.value_length": None},
            **{"attention.layer_norm_epsilon": None, "attention.layer_norm_rms_epsilon": NORM},
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture(name, tmp_path):
    source, file = make(name, tmp_path, MODELS)
    whole = logits(file)
    close(whole, expected(source))
    assert whole.std() > 0.1
    assert torch.equal(logits(file, quantised="auto"), whole)
    assert "Q8_0" in forms(load_split(file, dtype="float32", quantised="auto"))


def test_layers_of_full_attention_that_older_files_state_by_their_interval(tmp_path):
    source, file = make(
        "qwen3_5", tmp_path, MODELS, **{"attention.recurrent_layers": None, "full_attention_interval": 3}
    )
    close(logits(file), expected(source))


REFUSED = {  # of architectures metadata that they cannot have
    "heads of V": ("qwen3_5", {"ssm.time_step_rank": 5}, r"ssm\.inner_size in 5 heads, got 144"),
    "heads of K": ("qwen3_5", {"ssm.group_count": 5}, r"tensor 'blk\.0\.\w+\S*': expected rows and columns"),
    "no heads of K": ("qwen3_next", {"ssm.group_count": 0}, r"in_proj_qkvz\.weight' whose rows are in 0 groups"),
    "a kind of layer": ("nemotron_h", {"block_count": 5}, r"layers of one of the kinds linear_attention, .* got \[\]"),
    "heads of a layer": (
        "granite_hybrid",
        {"attention.head_count_kv": [0, 2]},
        r"3 values of attention\.head_count_kv",
    ),
    "two sizes": ("granite_hybrid", {"attention.head_count_kv": [0, 2, 4]}, r"one value of attention\.head_count_kv"),
    "an expansion": ("mamba2", {"ssm.inner_size": 96}, r"ssm\.inner_size in multiples of 64, got 96"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_understood(name, tmp_path):
    model, more, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        load_split(make(model, tmp_path, MODELS, **more)[1], dtype="float32")


def test_a_tied_head_of_falcon_h1_is_refused(tmp_path):
    """Its multiplier would be that of the embeddings."""
    file = make("falcon_h1", tmp_path, MODELS)[1]
    file.write_bytes(file.read_bytes().replace(b"output.weight", b"absent.weight"))
    with pytest.raises(UserError, match=r"a matrix 'output\.weight'"):
        load_split(file, dtype="float32")
