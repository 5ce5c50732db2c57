"""A decode step in one native call: the same bits as layer by layer, whatever the threads, in steps and in jobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.engine.executors import FusedExecutor
from hpcdecode.model import load_split
from hpcdecode.model.run.fused_step import FusedStep
from tests.support.isas import use_isa

FUSABLE = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "opt", "phi3", "minicpm3")
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # and latents
THREADS = 3
ISAS, DTYPES = ("avx2", "avx512_bf16", "amx"), ("float32", "bfloat16")
QUICK = [(THREADS, name) for name in FUSABLE] + [(1, "gemma3"), (2, "gemma3")]
QUICK += [(THREADS, "mixtral"), (2, "gpt_oss"), (THREADS, "deepseek_v2")]
ON_TILES = ("llama3", "gemma3", "mixtral")  # in float32, too
ALL = QUICK + [
    (threads, name) for name in FUSABLE + EXPERTS for threads in (1, 2, THREADS) if (threads, name) not in QUICK
]


def cases():
    """Every model on tiles in bfloat16, and in one dtype on either other ISA, one after the other; all else is `full`.

    Some are on tiles in float32, too. What depends on the model is its chains; on ISA and dtype, the kernels of these.
    """
    for number, (threads, name) in enumerate(ALL):
        for i, isa in enumerate(ISAS):
            for j, dtype in enumerate(DTYPES):
                chosen = (number + i + j) % 2 == 0 if isa != "amx" else dtype == "bfloat16" or name in ON_TILES
                quick = chosen and (threads, name) in QUICK
                yield pytest.param(isa, threads, name, dtype, marks=() if quick else pytest.mark.full)


@pytest.fixture
def isa(monkeypatch, request):
    use_isa(monkeypatch, request.param)


any_isa = pytest.mark.parametrize("isa", ["avx2"], indirect=True)  # what no instruction set decides


@pytest.fixture(params=[1, 2, THREADS])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def filled(model, lengths: list[int]):
    """A KV cache with random tokens in slots 0, 1, ..., and the same in as many slots more."""
    shapes, dtype, n = model.attends, str(model.dtype).removeprefix("torch."), len(lengths)
    kv_cache = open_kv_cache(
        shapes, kv_dtype=dtype, capacity_tokens=1 << 16, max_sequences=2 * n, threads=THREADS, team=True
    )
    slots, counts = np.arange(n, dtype=np.int32), np.array(lengths, np.int32)
    kv_cache.extend(slots, counts)
    for layer, shape in enumerate(shapes):
        rows = torch.randn(sum(lengths), shape.kv_columns, generator=torch.Generator().manual_seed(layer))
        kv_cache.append(layer, slots, counts, rows.to(model.dtype))
    for slot in range(n):
        kv_cache.fork(slot, n + slot)
    return kv_cache, slots


def by_layers(model, kv_cache, slots, inputs):
    n, (o, context) = len(slots), (None, inputs)
    for i, shape in enumerate(model.attends):
        qkv, context = model.slice(i, o, context)
        o = torch.empty(n, shape.out_columns, dtype=model.dtype)
        kv_cache.attend(i, slots, np.ones(n, np.int32), torch.cat(qkv, 1), o, model.sinks(i))
    return model.logits(o, context)


def run_fused(model, fused, slots, inputs):
    qkv, context = model.slice(0, None, inputs)
    o, context, seconds = fused.run(slots, torch.cat(qkv, 1), context)
    assert 0 < seconds < 10
    return model.logits(o, context)


@pytest.mark.parametrize(("isa", "threads", "name", "dtype"), cases(), indirect=["isa", "threads"])
def test_a_fused_step_has_the_bits_of_single_layers(checkpoint, isa, threads, name, dtype):
    model = load_split(checkpoint(name), dtype=dtype)
    lengths = np.random.RandomState(5).randint(1, 150, 180).tolist()
    kv_cache, slots = filled(model, lengths)
    fused = FusedStep.of(model, kv_cache)
    assert fused is not None
    for few in (180, 95, 29, 3, 1):  # pairs of blocks, blocks, and threads that share one
        some, other = slots[:few], slots[:few] + len(slots)
        for step in range(2):
            inputs = torch.arange(few) + 7 + step, torch.tensor(lengths[:few]) + step, torch.arange(few)
            kv_cache.extend(some, np.ones(few, np.int32))
            kv_cache.extend(other, np.ones(few, np.int32))
            read = kv_cache.bytes_read
            plain = by_layers(model, kv_cache, some, inputs)
            once = kv_cache.bytes_read - read
            assert torch.equal(run_fused(model, fused, other, inputs), plain)
            assert kv_cache.bytes_read - read == 2 * once
        kv_cache.truncate(0, lengths[0])
        kv_cache.truncate(int(other[0]), lengths[0])
        lengths = [lengths[0], *(n + 2 if i < few else n for i, n in enumerate(lengths[1:], 1))]


def test_models_with_more_than_chains_are_not_fused(checkpoint, monkeypatch):
    use_isa(monkeypatch, "generic")  # which has no GEMMs
    model = load_split(checkpoint("llama3"), dtype="float32")
    kv_cache = open_kv_cache(model.attends, kv_dtype="float32", capacity_tokens=1024, max_sequences=4)
    assert FusedStep.of(model, kv_cache) is None


@any_isa
def test_which_steps_are_fused(checkpoint, isa, threads):
    model = load_split(checkpoint("llama3"), dtype="float32")
    fused = FusedStep.of(model, filled(model, [3])[0])
    assert fused.suits([100] * 12)
    assert fused.suits([90, 110, 100, 100, 95, 105] * 2)
    torch.set_num_threads(2)
    assert fused.suits([100]) and fused.suits([1000] + [10] * 6)  # calls cost more than to attend to these alone
    assert not fused.suits([100_000] + [100] * 40)
    assert not fused.suits([100_000])
    torch.set_num_threads(THREADS + 1)  # more than the KV cache has
    assert not fused.suits([100] * 12)
    reference = open_kv_cache(
        model.attends, kv_dtype="float32", capacity_tokens=64, max_sequences=1, backend="reference"
    )
    assert FusedStep.of(model, reference) is None


@any_isa
def test_wrong_calls_are_refused(checkpoint, isa):
    model = load_split(checkpoint("llama3"), dtype="float32")
    kv_cache, slots = filled(model, [3, 4])
    fused = FusedStep.of(model, kv_cache)
    inputs = torch.arange(2), torch.arange(2), torch.arange(2)
    kv_cache.extend(slots, np.ones(2, np.int32))
    with pytest.raises(ValueError, match="slot 9"):
        run_fused(model, fused, np.array([0, 9], np.int32), inputs)
    with pytest.raises(ValueError, match="slots: expected 2, got 1"):
        run_fused(model, fused, slots[:1], inputs)
    run_fused(model, fused, slots, inputs)  # the KV cache is free again
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS + 1)
    try:
        with pytest.raises(ValueError, match=f"threads: expected {THREADS} at most, got {THREADS + 1}"):
            run_fused(model, fused, slots, inputs)
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="sinks: expected those of 3 layers, got 2"):
        kv_cache.step_attention(slots, "float32", [None, None])
    with pytest.raises(ValueError, match="expected attention where it has any"):
        fused.native.run(2, 1, [0] * fused.native.tensors, [0] * fused.native.tensors)


@any_isa
def test_a_job_of_many_rows_is_fused_and_says_the_same(isa, monkeypatch):
    prompts = [f"{i} rows of a file" for i in range(84)]
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
    fused_steps, run = [], FusedExecutor.run
    monkeypatch.setattr(FusedExecutor, "run", lambda self, *a: fused_steps.append(a[2].decodes) or run(self, *a))

    def texts():
        llm = LLM("demo", batch=len(prompts))
        return [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]

    together = texts()
    assert len(fused_steps) >= 7 and max(fused_steps) == len(prompts)
    monkeypatch.setattr(FusedExecutor, "suits", lambda self, step: False)
    fused_steps.clear()
    assert texts() == together and not fused_steps
