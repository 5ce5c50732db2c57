"""Layers for multi-token prediction: the logits of transformers' own, from checkpoints as their families have them."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hpcdecode.model import load_split
from hpcdecode.model.run.load import ModelPart
from tests.support.gguf_converted import convert, save_ternary
from tests.support.gguf_models import MODELS
from tests.support.members import members_heads
from tests.support.mtp import add_mtp, predicted
from tests.support.quantised import pair
from tests.support.steps import Attention

FAMILIES = ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "qwen3_next", "qwen3_5"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(checkpoint, tmp_path, name):
    path = shutil.copytree(checkpoint(name), tmp_path / name)
    layer = add_mtp(path)
    model = load_split(path, dtype="float32", mtp=True)
    generator = torch.Generator().manual_seed(1)
    ids, hidden = torch.arange(9, 29), torch.randn(20, 64, generator=generator)
    expected, _ = predicted(layer, ids, hidden)
    torch.testing.assert_close(logits_of(model, ids, hidden), expected, rtol=1e-3, atol=1e-3)


def logits_of(model, ids, hidden):
    every = torch.arange(len(ids))
    rows, context = model.slice(0, None, (ids, every, every, hidden))
    return model.logits(Attention(model)(0, [0] * len(ids), every, *rows), context)


@pytest.mark.parametrize("name", ["llama3", "gemma2", "gpt_oss", "opt", "deepseek_v3"])
def test_hidden_states_are_those_of_transformers(checkpoint, name):
    """Beside the same logits, of whole models and of the members of a group."""
    path, ids = checkpoint(name), list(range(20, 60))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model.get_decoder()(torch.tensor([ids])).last_hidden_state[0]
    (plain,) = last_of([load_split(path, dtype="float32")], ids)
    (head,) = last_of([load_split(path, dtype="float32", hidden=True)], ids)
    assert torch.equal(head.logits(), plain.logits())
    torch.testing.assert_close(head.hidden, expected, rtol=1e-3, atol=1e-3)
    members = [load_split(path, dtype="float32", hidden=True, part=ModelPart(2, member)) for member in range(2)]
    for head in last_of(members, ids):
        assert len(head.logits()) == len(ids)
        torch.testing.assert_close(head.hidden, expected, rtol=1e-3, atol=1e-3)


def last_of(models, ids):
    return members_heads(models, [Attention(model) for model in models], ids, range(len(ids)))


def test_a_quantised_layer_is_what_it_stands_for(checkpoint, tmp_path):
    """In FP8 by blocks, as the checkpoint of DeepSeek-V3 has it and the model."""
    source = shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "source")
    add_mtp(source)

    def in_a_block(_, weight):
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale.view(1, 1)}, codes.float() * scale

    stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [256, 256]}
    made = pair(source, tmp_path, in_a_block, {**stated, "modules_to_not_convert": ["lm_head"]})
    ids, hidden = torch.arange(9, 29), torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    plain, quantised = (load_split(path, dtype="float32", mtp=True) for path in (made.plain, made.quantised))
    assert torch.equal(logits_of(plain, ids, hidden), logits_of(quantised, ids, hidden))
    packed = load_split(made.quantised, dtype="bfloat16", mtp=True, quantised="auto")
    near = logits_of(load_split(made.plain, dtype="bfloat16", mtp=True), ids, hidden.bfloat16())
    torch.testing.assert_close(logits_of(packed, ids, hidden.bfloat16()), near, rtol=0.1, atol=0.1)


def test_a_layer_of_a_gguf_file(tmp_path):
    architecture, config, values = MODELS["glm4_moe"]
    source = save_ternary(config(transformers), tmp_path / "source")
    add_mtp(source)
    file = convert(source, architecture, lambda name: "F32", **values)
    ids, hidden = torch.arange(9, 29), torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    plain, packed = (load_split(path, dtype="float32", mtp=True) for path in (source, file))
    assert torch.equal(logits_of(plain, ids, hidden), logits_of(packed, ids, hidden))
