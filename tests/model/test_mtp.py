"""Layers for multi-token prediction: the logits of transformers' own, from checkpoints as their families have them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import attention_shapes
from hpcdecode.exchange.base import joined
from hpcdecode.model import load_split
from hpcdecode.model.run.load import ModelPart
from tests.support.members import members_heads
from tests.support.mtp import add_mtp, predicted
from tests.support.steps import Attention

FAMILIES = ["deepseek_v3", "deepseek_v32", "glm4_moe_lite", "qwen3_next", "qwen3_5"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(checkpoint, tmp_path, name):
    path = shutil.copytree(checkpoint(name), tmp_path / name)
    layer = add_mtp(path)
    model = load_split(path, dtype="float32", mtp=True)
    generator = torch.Generator().manual_seed(1)
    ids, hidden = torch.arange(9, 29), torch.randn(20, 64, generator=generator)
    expected, _ = predicted(layer, ids, hidden)
    shapes = attention_shapes(model.attends)
    cache = open_kv_cache(shapes, kv_dtype="float32", capacity_tokens=64, max_sequences=1, block_tokens=64, threads=1)
    cache.extend(np.array([0], np.int32), np.array([20], np.int32))
    rows, context = model.slice(0, None, (ids, torch.arange(20), torch.arange(20), hidden))
    o = model.empty_output(0, 20)
    cache.attend(0, np.array([0], np.int32), np.array([20], np.int32), joined(*rows), o, model.sinks(0))
    torch.testing.assert_close(model.logits(o, context), expected, rtol=1e-3, atol=1e-3)


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
