"""The language model of a checkpoint with towers gives the whole model's logits for text, and no tower is read."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from hpcdecode.model import load_split
from hpcdecode.model.frontend.tensors import StoredTensor
from hpcdecode.planning.model_size import ModelSize
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, save_whole

QUICK = ("gemma3", "qwen2_5_vl", "minicpmv4_6")  # the last computes logits of all tokens
OTHERS = ("mistral3", "kimi_k25", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "internvl", "glm4v", "aya_vision")
OTHERS += ("cohere2_vision", "glm4v_moe", "ernie4_5_vl_moe", "hunyuan_vl", "hy_v4_vl", "granite4_vision")
OTHERS += ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
TOWERS = ("vision", "visual", "projector", "image")  # in the keys of tensors that text does not need


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)])
def test_logits_of_text_equal_those_of_the_whole_model(name, tmp_path, monkeypatch):
    config = tiny(name)
    whole = save_whole(config, tmp_path)
    read, original = set(), StoredTensor.__call__

    def counted(self):
        read.add(self._key)
        return original(self)

    monkeypatch.setattr(StoredTensor, "__call__", counted)
    model = load_split(tmp_path, dtype="float32")
    worst = logits_difference(model, whole)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    towers = {key for key in keys if any(word in key for word in TOWERS)}
    print(f"{name}: max logit error {worst:.1e}, {len(read)} of {len(keys)} tensors read, {len(towers)} of towers")
    assert worst < 1e-4 and towers and read and not read & towers
    assert len(model.attends) == config.get_text_config().num_hidden_layers
    assert model.max_positions == config.get_text_config().max_position_embeddings


def test_the_size_of_a_model_with_a_tower_is_that_of_its_text(tmp_path):
    config = tiny("gemma3")
    config.save_pretrained(tmp_path)
    size, text = ModelSize.from_directory(str(tmp_path)), config.get_text_config()
    with torch.device("meta"):
        from transformers import Gemma3ForCausalLM

        alone = Gemma3ForCausalLM._from_config(text)
    assert size.layer_weights + size.head_weights == sum(p.numel() for p in alone.parameters())
    assert (size.layers, size.hidden, size.max_positions) == (3, 64, 1024)
