"""Llama 4: experts by choice, temperature by position, and sequences of at most one chunk of attention."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.llama4 import GivenPositions, one_chunk, tracing_llama4
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, save_whole

CHUNK = 160  # tokens; the longer sequence of `logits_difference` has 130
TEXT = {"attention_chunk_size": CHUNK, "floor_scale": 16, "attn_temperature_tuning": True, "num_key_value_heads": 2}


@pytest.mark.parametrize("name", ["llama4_text", "llama4"])
def test_logits_equal_transformers(name, tmp_path, caplog):
    """Layers with and without rotary positions and chunks, dense ones and ones of experts; no tower is read."""
    text = {**TEXT, "num_hidden_layers": 4, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 2}
    text |= {"moe_layers": [1, 2], "num_experts_per_tok": 1 if name == "llama4" else 2}
    config = tiny(name, **text)
    assert set(config.get_text_config().layer_types) == {"chunked_attention", "full_attention"}
    whole = save_whole(config, tmp_path)
    whole = whole.language_model if name == "llama4" else whole  # without images the whole ends in an AttributeError
    with caplog.at_level(logging.WARNING, logger="hpcdecode"):
        model = load_split(tmp_path, dtype="float32", announce=True)
    assert model.max_positions == CHUNK and "at most 160 tokens, prompts included, in place of 1,024" in caplog.text
    worst = logits_difference(model, whole)
    print(f"{name}: max logit error {worst:.1e}")
    assert worst < 1e-4
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any("vision" in key for key in file.keys()) == (name == "llama4")  # noqa: SIM118


def test_a_layer_has_the_positions_that_it_is_given():
    past = GivenPositions(torch.tensor([[7, 3, 9]]))
    assert torch.equal(torch.arange(3) + past.get_seq_length(0), torch.tensor([7, 3, 9]))
    key, value = torch.zeros(1), torch.ones(1)
    assert past.update(key, value, 0) == (key, value)


def test_layers_are_transformers_own_after_the_trace():
    from transformers.models.llama4 import modeling_llama4

    before = modeling_llama4.Llama4TextMoe.forward
    config = tiny("llama4_text", **TEXT)
    with torch.device("meta"):
        model = modeling_llama4.Llama4ForCausalLM(config)
    with pytest.raises(ZeroDivisionError), tracing_llama4(model):
        assert modeling_llama4.Llama4TextMoe.forward is not before
        raise ZeroDivisionError
    assert modeling_llama4.Llama4TextMoe.forward is before


@pytest.mark.parametrize("size", [None, 0, "8192", True])
def test_a_chunk_without_a_length_is_refused(size):
    config = SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=size)
    with pytest.raises(UserError, match=f"expected attention_chunk_size to be a number of tokens, got {size!r}"):
        one_chunk(config)
