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

pytestmark = pytest.mark.usefixtures("all_cores")

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


def by_layers(model, kv_cache, slots, inputs, counts=None):
    counts, (o, context) = np.ones(len(slots), np.int32) if counts is None else counts, (None, inputs)
    for i, shape in enumerate(model.attends):
        qkv, context = model.slice(i, o, context)
        o = torch.empty(counts.sum(), shape.out_columns, dtype=model.dtype)
        kv_cache.attend(i, slots, counts, torch.cat(qkv, 1), o, model.sinks(i))
    return model.logits(o, context)


def run_fused(model, fused, slots, inputs, counts=None):
    qkv, context = model.slice(0, None, inputs)
    counts = np.ones(len(slots), np.int32) if counts is None else counts
    o, context, seconds = fused.run(slots, counts, torch.cat(qkv, 1), context)
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


SEVERAL = [(isa, name) for isa in ISAS for name in ("llama3", "gemma3", "gpt_oss")]
SEVERAL += [("avx2", name) for name in ("mixtral", "deepseek_v2", "minicpm3", "gpt2")]


@pytest.mark.parametrize(("isa", "name"), SEVERAL, indirect=["isa"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tokens_of_a_sequence_have_the_bits_of_one_after_the_other(checkpoint, isa, threads, name, dtype):
    model, lengths = load_split(checkpoint(name), dtype=dtype), [70, 3, 128, 9]
    counts = np.array([3, 1, 12, 2], np.int32)
    rows = [(slot, place) for slot, count in enumerate(counts.tolist()) for place in range(count)]
    kv_cache, slots = filled(model, lengths)
    fused = FusedStep.of(model, kv_cache)
    assert fused is not None and fused.takes(len(slots), len(rows), threads)

    def inputs(some):
        ids = torch.tensor([7 + 11 * slot + 5 * place for slot, place in some])
        return ids, torch.tensor([lengths[slot] + place for slot, place in some]), torch.arange(len(some))

    one_by_one = {}
    for place in range(max(counts)):
        own = slots[counts > place]
        kv_cache.extend(own, np.ones(len(own), np.int32))
        some = [(int(slot), place) for slot in own]
        one_by_one |= dict(zip(some, by_layers(model, kv_cache, own, inputs(some)), strict=True))
    expected = torch.stack([one_by_one[row] for row in rows])
    other = slots + len(slots)
    for run in (
        lambda: by_layers(model, kv_cache, other, inputs(rows), counts),
        lambda: run_fused(model, fused, other, inputs(rows), counts),
    ):
        kv_cache.extend(other, counts)
        assert torch.equal(run(), expected)
        for slot, length in zip(other.tolist(), lengths, strict=True):
            kv_cache.truncate(slot, length)


@any_isa
def test_steps_of_several_blocks_take_one_token_of_each_sequence(checkpoint, isa):
    model = load_split(checkpoint("llama3"), dtype="float32")
    kv_cache, slots = filled(model, [3] * 100)
    fused, counts = FusedStep.of(model, kv_cache), np.full(100, 9, np.int32)
    assert not fused.takes(100, 900, 2) and fused.takes(100, 100, 2) and not fused.suits([3] * 100, 900)
    kv_cache.extend(slots, counts)
    with pytest.raises(ValueError, match="expected one token of each sequence in a step of 900 tokens"):
        run_fused(model, fused, slots, (torch.arange(900) % 450, torch.arange(900) % 9, torch.arange(900)), counts)
    with pytest.raises(ValueError, match="counts: expected one of at least 1 for each slot"):
        kv_cache.step_attention(slots, counts[:5], "float32", [None] * 3)


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
    with pytest.raises(ValueError, match="slots: expected those of 2 tokens, got 1"):
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
        kv_cache.step_attention(slots, np.ones(2, np.int32), "float32", [None, None])
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
