"""Models whose packed weights lie in memory that they share compute what a model of its own weights does."""

from __future__ import annotations

import math

import pytest
import torch

from hpcdecode.model import load_split
from hpcdecode.model.frontend.checkpoint import open_checkpoint
from hpcdecode.model.frontend.quantization.plain import DequantisedTensor
from hpcdecode.model.run import lm_head
from hpcdecode.model.run.load import ModelPart
from hpcdecode.system.shared_memory import SharedMemory
from tests.support.quantised import pair
from tests.support.steps import Attention, step

TOKENS = [(0, place, 7 * place % 500 + 2) for place in range(9)]


@pytest.mark.parametrize(
    ("name", "quantised"),
    [("llama3", None), ("llama3", "int8"), ("llama3", "int4"), ("gpt2", None), ("gpt2", "mxfp4"), ("mixtral", None)],
)
def test_sharing_models_have_the_logits_of_one_alone(checkpoint, monkeypatch, name, quantised):
    monkeypatch.setattr(lm_head, "MIN_OUTPUTS", 1)  # so that the head's search is shared, too
    ways = {"dtype": "float32", "quantised": quantised}
    alone = load_split(checkpoint(name), **ways)
    with SharedMemory.offered() as address:
        memories = [SharedMemory.open(address, place, 2) for place in range(2)]
        sharing = [load_split(checkpoint(name), **ways, memory=memory) for memory in memories]
        for memory in memories:
            memory.close()
    expected = step(alone, Attention(alone), TOKENS, [8])
    for model in sharing:
        assert torch.equal(step(model, Attention(model), TOKENS, [8]), expected)
        if model.head is not None:
            assert torch.equal(model.head.head.norms, alone.head.head.norms)
            assert torch.equal(model.head.head.rounded, alone.head.head.rounded)


def test_tables_of_several_tokens_are_made_by_one_of_those_that_share_them(checkpoint):
    """From the shards of the checkpoint, for each of two layers."""
    path = checkpoint("qwen4_exp_text")
    alone = load_split(path, dtype="float32")
    with SharedMemory.offered() as address:
        memories = [SharedMemory.open(address, place, 2) for place in range(2)]
        sharing = [load_split(path, dtype="float32", tables=memory) for memory in memories]
        shared = sum(memory.made for memory in memories)
        assert [memory.made for memory in memories] == memories[0].shares == memories[1].shares
        for memory in memories:
            memory.close()
    tables = [t for key, t in open_checkpoint(path).items() if ".ngram_embedding." in key]
    assert shared == 4 * sum(math.prod(table.shape) for table in tables)
    expected = step(alone, Attention(alone), TOKENS, [8])
    for model in sharing:
        assert torch.equal(step(model, Attention(model), TOKENS, [8]), expected)


def test_weights_that_stay_in_the_mapped_files_are_counted_once(checkpoint):
    model = load_split(checkpoint("llama3"), dtype="float32")
    embedding, norms = 512 * 64, (2 * 3 + 1) * 64
    assert model.mapped_bytes == 4 * (embedding + norms)
    assert load_split(checkpoint("llama3"), dtype="bfloat16").mapped_bytes == 0  # converted


def test_each_weight_is_dequantised_by_one_of_those_that_share_it(checkpoint, tmp_path, monkeypatch):
    def quantise(stem, weight):
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)}, weight

    made = pair(checkpoint("llama3"), tmp_path, quantise, {"quant_method": "fp8"})
    read, filled = [], DequantisedTensor._filled

    def counted(tensor, parts):
        read.append(tensor._key)
        return filled(tensor, parts)

    monkeypatch.setattr(DequantisedTensor, "_filled", counted)
    with SharedMemory.offered() as address:
        memories = [SharedMemory.open(address, place, 2) for place in range(2)]
        sharing = [load_split(made.quantised, dtype="float32", memory=memory) for memory in memories]
        for memory in memories:
            memory.close()
    assert len(read) == len(set(read)) == 3 * 7
    assert sharing[0].mapped_bytes == 4 * (512 * 64 + 7 * 64)


def test_members_share_tables(checkpoint):
    """Of which each has all, beside its part of the other weights."""
    path = checkpoint("qwen4_exp_text")
    with SharedMemory.offered() as address:
        memories = [SharedMemory.open(address, place, 2) for place in range(2)]
        for place, memory in enumerate(memories):
            load_split(path, dtype="float32", part=ModelPart(2, place), tables=memory)
        made = [memory.made for memory in memories]
        assert made == memories[0].shares == memories[1].shares and min(made) > 0
        for memory in memories:
            memory.close()
