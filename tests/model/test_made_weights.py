"""Models of one checkpoint take embeddings and LM head of each other where they are made alike, and only there."""

from __future__ import annotations

import shutil

import pytest
import torch

from hpcdecode.model import load_split
from hpcdecode.model.run import lm_head
from hpcdecode.model.run.load import ModelPart
from hpcdecode.system.shared_memory import SharedMemory
from tests.support.adapters import adapter
from tests.support.mtp import add_mtp
from tests.support.steps import Attention, step

TOKENS = [(0, place, 7 * place % 500 + 2) for place in range(9)]


@pytest.fixture(autouse=True)
def search_is_worth_it(monkeypatch):
    monkeypatch.setattr(lm_head, "MIN_OUTPUTS", 1)


@pytest.mark.parametrize(("name", "dtype"), [("deepseek_v3", "float32"), ("qwen3_next", "bfloat16")])
def test_a_layer_for_multi_token_prediction_has_them_of_the_model(checkpoint, tmp_path, name, dtype):
    path = shutil.copytree(checkpoint(name), tmp_path / name)
    add_mtp(path)
    model = load_split(path, dtype=dtype, hidden=True)
    alone, beside = (load_split(path, dtype=dtype, mtp=True, hidden=True, like=like) for like in (None, model))
    assert beside.head.head.weight is model.head.head.weight
    assert beside.head.head.norms is model.head.head.norms and beside.head.head.rounded is model.head.head.rounded
    assert beside.head.head.native is not model.head.head.native  # which keeps what a search is at
    embeddings = [w for w in model.weights(0) if w.shape == (model.vocab_size, 64)]
    assert len(embeddings) == 1 and any(w is embeddings[0] for w in beside.weights(0))
    every, hidden = torch.arange(20), torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    made = []
    for layer in (alone, beside):
        rows, context = layer.slice(0, None, (every + 9, every, every, hidden))
        o = Attention(layer)(0, [0] * 20, every, *rows)
        made.append([layer.logits(o, context), *layer.head.head.largest(hidden)])
    assert all(map(torch.equal, *made))


WAYS = {
    "whole": {},
    "int8": {"quantised": "int8"},
    "int4": {"quantised": "int4"},
    "a member": {"part": ModelPart(2, 1)},
    "adapter": {"lora": True},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize(("first", "second"), [(way, "whole") for way in WAYS] + [("int8", "int4"), ("whole", "int8")])
def test_logits_are_those_of_a_model_alone(checkpoint, tmp_path, first, second):
    """In whatever form another one has its weights; of models with a head of their own."""
    path, merged = checkpoint("llama2"), tmp_path / "adapter"

    def loaded(way, like=None):
        options = {"dtype": "float32"} | WAYS[way]
        if options.get("lora"):
            options["lora"] = str(adapter(path, merged, target_modules=["down_proj", "lm_head"], r=4))
        return load_split(path, **options, like=like)

    model, alone = loaded(first), loaded(second)
    beside = loaded(second, like=model)
    expected = step(alone, Attention(alone), TOKENS, [8])
    assert torch.equal(step(beside, Attention(beside), TOKENS, [8]), expected)
    has = {id(w) for i in (0, len(model.attends)) for w in model.weights(i)}
    shared = sum(id(w) in has for i in (0, len(beside.attends)) for w in beside.weights(i))
    assert (shared > 0) == (first != "bfloat16")  # embeddings, in float32
    same_head = first not in ("a member", "adapter", "bfloat16")
    heads = [m.head.head.weight for m in (model, beside) if m.head is not None]  # in few bits they have no search
    assert len(heads) < 2 or (heads[0] is heads[1]) == same_head


def test_a_head_in_shared_memory_beside_another_ones(checkpoint):
    """A model takes the weight of one that has no search over it, and makes that in memory of its own."""
    path = checkpoint("llama2")
    alone = load_split(path, dtype="float32")
    with SharedMemory.offered() as address:
        memories = [SharedMemory.open(address, place, 2) for place in range(2)]
        first = [load_split(path, dtype="float32", memory=memory) for memory in memories]
        for memory in memories:
            memory.close()
    for model in first:
        model.head = None
    with SharedMemory.offered() as address:
        memories = [SharedMemory.open(address, place, 2) for place in range(2)]
        second = [
            load_split(path, dtype="float32", memory=memory, like=model)
            for memory, model in zip(memories, first, strict=True)
        ]
        for memory in memories:
            memory.close()
    expected = step(alone, Attention(alone), TOKENS, [8])
    for model in second:
        assert torch.equal(step(model, Attention(model), TOKENS, [8]), expected)
        assert torch.equal(model.head.head.rounded, alone.head.head.rounded)
