"""Llama 4: experts by choice, temperature by position, and attention in chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from hpcdecode import LLM, SamplingParams
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.llama4 import GivenPositions, chunk_size, tracing_llama4
from hpcdecode.model.run.load import ModelPart
from tests.support.models import tokenizer
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, save_whole

CHUNK = 48  # tokens; the longer sequence of `logits_difference` has 130
TEXT = {"attention_chunk_size": CHUNK, "floor_scale": 16, "attn_temperature_tuning": True, "num_key_value_heads": 2}


@pytest.mark.parametrize("name", ["llama4_text", "llama4"])
def test_logits_equal_transformers(name, tmp_path):
    """Layers with and without rotary positions and chunks, dense ones and ones of experts; no tower is read."""
    text = {**TEXT, "num_hidden_layers": 4, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 2}
    text |= {"moe_layers": [1, 2], "num_experts_per_tok": 1 if name == "llama4" else 2}
    config = tiny(name, **text)
    assert set(config.get_text_config().layer_types) == {"chunked_attention", "full_attention"}
    whole = save_whole(config, tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert model.max_positions == 1024
    assert {(s.window, s.chunked) for s in model.attends} == {(CHUNK, True), (None, False)}
    worst = logits_difference(model, whole)
    print(f"{name}: max logit error {worst:.1e}")
    assert worst < 1e-4
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any("vision" in key for key in file.keys()) == (name == "llama4")  # noqa: SIM118


def test_tokens_beyond_a_chunk_equal_transformers(tmp_path):
    """Of rows alone and together, whose prompts and tokens end in other chunks than they begin in."""
    text = {**TEXT, "num_hidden_layers": 2, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 2}
    whole = save_whole(tiny("llama4_text", **text, moe_layers=[1]), tmp_path)
    tokenizer().save_pretrained(tmp_path)
    prompts = [[(7 * i + 3 * n) % 430 + 2 for i in range(n)] for n in (40, 100, 5)]
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    engine = LLM(str(tmp_path), dtype="float32", kv_dtype="float32")
    together = [out.outputs[0].token_ids for out in engine.generate(rows, greedy, use_tqdm=False)]
    for prompt, row, tokens in zip(prompts, rows, together, strict=True):
        (alone,) = engine.generate([row], greedy, use_tqdm=False)
        assert list(alone.outputs[0].token_ids) == list(tokens)
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            best = whole(input_ids=ids, use_cache=False).logits[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == list(tokens)


def test_members_attend_in_chunks(tmp_path):
    text = {**TEXT, "num_hidden_layers": 2, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 2}
    save_whole(tiny("llama4_text", **text, moe_layers=[1]), tmp_path)
    model = load_split(tmp_path, dtype="float32", part=ModelPart(tp=2, tp_rank=1))
    assert [(s.kv_heads, s.window, s.chunked) for s in model.attends] == [(1, CHUNK, True), (1, None, False)]


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
    with pytest.raises(UserError, match=f"expected attention_chunk_size to be a number of tokens, got {size!r}"):
        chunk_size(SimpleNamespace(attention_chunk_size=size))
