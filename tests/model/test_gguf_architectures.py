"""GGUF files of architectures whose metadata transformers cannot read give the logits of the checkpoint."""

from __future__ import annotations

import pytest
import torch
import transformers

from hpcdecode.model import load_split
from hpcdecode.model.frontend.config import read_config
from hpcdecode.model.run.load import ModelPart
from tests.support.gguf_converted import as_it_is, convert, save_ternary
from tests.support.gguf_logits import IDS, close, expanded, expected, logits, projections
from tests.support.gguf_models import MODELS, YARN, kinds, make
from tests.support.models import LATENT, SHAPE
from tests.support.quantised import forms

QUICK = ("gemma4", "glm4_moe_lite", "deepseek_v3", "exaone4", "granite_moe", "olmo3", "glm4", "llama4", "ernie4_5_moe")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in MODELS])
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


@pytest.mark.parametrize("pattern", [None, 4, [1, 1, 1, 0]])
def test_windows_by_the_period_of_a_layer_without_one(pattern, tmp_path):
    """Which is 4 if it is not stated."""
    source, file = make("exaone4", tmp_path, **{"attention.sliding_window_pattern": pattern})
    close(logits(file), expected(source))


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
