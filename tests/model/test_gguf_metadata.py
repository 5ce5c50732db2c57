"""Metadata of GGUF files that is hostile, or not understood, is refused by name; so are tensors that do not fit."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.gguf.config import stated_by
from hpcdecode.model.frontend.gguf.tensors import read_headers
from tests.support.gguf_models import MODELS, make

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


@pytest.mark.parametrize(("name", "groups"), [("deepseek_v3", (8, 3)), ("glm4_moe", (1, 1))])
def test_groups_of_experts_that_older_files_leave_out(name, groups, tmp_path):
    """Those of 160 experts are known of DeepSeek-V2; GLM-4.5 has as many, and one group."""
    (header,) = read_headers([make(name, tmp_path)[1]])
    architecture = MODELS[name][0]
    values = {key: v for key, v in header.values.items() if not key.startswith(f"{architecture}.expert_group")}
    config = stated_by([header._replace(values={**values, f"{architecture}.expert_count": 160})])
    assert (config["n_group"], config["topk_group"]) == groups
