"""A decode step in one native call: the same bits as layer by layer, whatever the threads, in steps and in jobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode import LLM, SamplingParams, _attn_cpu
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.engine.s_rank import SRank
from hpcdecode.exchange.local import LocalLink
from hpcdecode.model import load_split
from hpcdecode.model.run.fused_step import FusedStep

pytestmark = pytest.mark.skipif("avx512_bf16" not in _attn_cpu.supported_isas(), reason="needs products of our own")
WALKABLE = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "opt", "phi3")
THREADS = 3


@pytest.fixture(autouse=True)
def isa(monkeypatch):
    monkeypatch.setenv("HPCDECODE_ISA", "avx512_bf16")


@pytest.fixture(params=[1, 2, THREADS])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def filled(model, lengths: list[int]):
    """A store with random tokens in slots 0, 1, ..., and the same in as many slots more."""
    shapes, dtype, n = model.attends, str(model.dtype).removeprefix("torch."), len(lengths)
    store = open_kv_cache(
        shapes, kv_dtype=dtype, capacity_tokens=1 << 16, max_sequences=2 * n, threads=THREADS, team=True
    )
    slots, counts = np.arange(n, dtype=np.int32), np.array(lengths, np.int32)
    store.extend(slots, counts)
    for layer, shape in enumerate(shapes):
        rows = torch.randn(sum(lengths), shape.kv_columns, generator=torch.Generator().manual_seed(layer))
        store.append(layer, slots, counts, rows.to(model.dtype))
    for slot in range(n):
        store.fork(slot, n + slot)
    return store, slots


def by_layers(model, store, slots, inputs):
    n, (o, context) = len(slots), (None, inputs)
    for i, shape in enumerate(model.attends):
        *qkv, context = model.slice(i, o, context)
        o = torch.empty(n, shape.out_columns, dtype=model.dtype)
        store.attend(i, slots, np.ones(n, np.int32), torch.cat(qkv, 1), o, model.sinks(i))
    return model.logits(o, context)


def walked(model, walk, slots, inputs):
    *qkv, context = model.slice(0, None, inputs)
    o, context, seconds = walk.run(slots, torch.cat(qkv, 1), context)
    assert 0 < seconds < 10
    return model.logits(o, context)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WALKABLE)
def test_a_walk_has_the_bits_of_single_layers(checkpoint, threads, name, dtype):
    model = load_split(checkpoint(name), dtype=dtype)
    lengths = np.random.RandomState(5).randint(1, 150, 180).tolist()
    store, slots = filled(model, lengths)
    walk = FusedStep.of(model, store)
    assert walk is not None
    for few in (180, 95, 29, 3, 1):  # pairs of blocks, blocks, and threads that share one
        some, other = slots[:few], slots[:few] + len(slots)
        for step in range(2):
            inputs = torch.arange(few) + 7 + step, torch.tensor(lengths[:few]) + step, torch.arange(few)
            store.extend(some, np.ones(few, np.int32))
            store.extend(other, np.ones(few, np.int32))
            read = store.bytes_read
            plain = by_layers(model, store, some, inputs)
            once = store.bytes_read - read
            assert torch.equal(walked(model, walk, other, inputs), plain)
            assert store.bytes_read - read == 2 * once
        store.truncate(0, lengths[0])
        store.truncate(int(other[0]), lengths[0])
        lengths = [lengths[0], *(n + 2 if i < few else n for i, n in enumerate(lengths[1:], 1))]


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2"])
def test_models_with_more_than_chains_are_not_walked(checkpoint, name):
    model = load_split(checkpoint(name), dtype="float32")
    store = open_kv_cache(model.attends, kv_dtype="float32", capacity_tokens=1024, max_sequences=4)
    assert FusedStep.of(model, store) is None


def test_which_steps_are_walked(checkpoint, threads):
    model = load_split(checkpoint("llama3"), dtype="float32")
    walk = FusedStep.of(model, filled(model, [3])[0])
    assert walk.suits([100] * 12)
    assert walk.suits([90, 110, 100, 100, 95, 105] * 2)
    torch.set_num_threads(2)
    assert not walk.suits([100])
    assert not walk.suits([100_000] + [100] * 40)
    torch.set_num_threads(THREADS + 1)  # more than the store has
    assert not walk.suits([100] * 12)
    reference = open_kv_cache(
        model.attends, kv_dtype="float32", capacity_tokens=64, max_sequences=1, backend="reference"
    )
    assert FusedStep.of(model, reference) is None


def test_wrong_calls_are_refused(checkpoint):
    model = load_split(checkpoint("llama3"), dtype="float32")
    store, slots = filled(model, [3, 4])
    walk = FusedStep.of(model, store)
    inputs = torch.arange(2), torch.arange(2), torch.arange(2)
    store.extend(slots, np.ones(2, np.int32))
    with pytest.raises(ValueError, match="slot 9"):
        walked(model, walk, np.array([0, 9], np.int32), inputs)
    with pytest.raises(ValueError, match="slots: expected 2, got 1"):
        walked(model, walk, slots[:1], inputs)
    walked(model, walk, slots, inputs)  # the store is free again
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS + 1)
    try:
        with pytest.raises(ValueError, match=f"threads: expected {THREADS} at most, got {THREADS + 1}"):
            walked(model, walk, slots, inputs)
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="sinks: expected those of 3 layers, got 2"):
        store.step_attention(slots, "float32", [None, None])
    with pytest.raises(ValueError, match="expected attention where it has any"):
        walk.native.run(2, 1, [0] * walk.native.tensors, [0] * walk.native.tensors)


def test_a_job_of_many_rows_is_walked_and_says_the_same(checkpoint, monkeypatch):
    prompts = [f"{i} rows of a file" for i in range(84)]
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
    walks, walk = [], LocalLink.walk
    monkeypatch.setattr(LocalLink, "walk", lambda *a: walks.append(len(a[2])) or walk(*a))

    def texts():
        llm = LLM("demo", batch=len(prompts))
        return [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]

    together = texts()
    assert len(walks) >= 7 and max(walks) == len(prompts)
    monkeypatch.setattr(SRank, "_walks", lambda self, step: False)
    walks.clear()
    assert texts() == together and not walks
