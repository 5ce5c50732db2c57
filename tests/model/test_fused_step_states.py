"""A decode step of models whose layers keep states in one native call: the same bits as layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode.attention.cpu_step import moved_bytes
from hpcdecode.attention.open import open_layers
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import with_states_as
from hpcdecode.engine.executors import FusedExecutor
from hpcdecode.exchange.base import joined
from hpcdecode.model import load_split
from hpcdecode.model.run import fused_step
from hpcdecode.model.run.fused_step import FusedStep
from tests.support.isas import use_isa

pytestmark = pytest.mark.usefixtures("all_cores")

FUSABLE = ("qwen3_5", "olmo_hybrid", "falcon_h1", "bamba", "lfm2", "mamba2")
EXPERTS = ("granitemoehybrid", "qwen3_5_moe", "kimi_linear")
THREADS = 3


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def opened(model, sequences: int, state_dtype: str = "float32"):
    kept = [i for i, shape in enumerate(model.attends) if isinstance(shape, RecurrentShape)]
    return open_layers(
        with_states_as(model.attends, state_dtype),
        [model.recurrent_weights(i) for i in kept],
        kv_dtype=str(model.dtype).removeprefix("torch."),
        capacity_tokens=1 << 32,  # without attention a block of this counts for a state
        max_sequences=sequences,
        threads=THREADS,
        team=True,
    )


def by_layers(model, kv_cache, slots, counts, inputs):
    kv_cache.extend(slots, counts)
    o, context = None, inputs
    for i, shape in enumerate(model.attends):
        rows, context = model.slice(i, o, context)
        o = torch.empty(len(rows[0]), shape.out_columns, dtype=model.dtype)
        kv_cache.attend(i, slots, counts, joined(*rows), o, model.sinks(i))
    return model.logits(o, context)


def filled(model, count: int, state_dtype: str = "float32"):
    """A KV cache with tokens in slots 0, 1, ..., and the same in as many slots more."""
    kv_cache, slots, counts = (
        opened(model, 2 * count, state_dtype),
        np.arange(count, dtype=np.int32),
        np.full(count, 5, np.int32),
    )
    tokens = torch.arange(5 * count)
    by_layers(model, kv_cache, slots, counts, (tokens % 450 + 3, tokens % 5, torch.arange(count)))
    for slot in range(count):
        kv_cache.fork(slot, count + slot)
    return kv_cache, slots


def run_fused(model, fused, slots, inputs):
    rows, context = model.slice(0, None, inputs)
    o, context, seconds = fused.run(slots, np.ones(len(slots), np.int32), joined(*rows), context)
    assert 0 < seconds < 10
    return model.logits(o, context)


QUICK = dict(zip(FUSABLE, ("float32", "bfloat16", "bfloat16", "float32", "bfloat16", "float32"), strict=True))
DTYPES = [
    pytest.param(name, dtype, "float32", marks=() if dtype == QUICK[name] else pytest.mark.full)
    for name in FUSABLE
    for dtype in ("float32", "bfloat16")
]
DTYPES += [("qwen3_5", "float32", "bfloat16"), ("falcon_h1", "bfloat16", "bfloat16")]
DTYPES += [(name, "bfloat16", "float32") for name in EXPERTS] + [("granitemoehybrid", "float32", "float32")]


@pytest.mark.parametrize("isa", ["avx2", "amx"])
@pytest.mark.parametrize("name, dtype, state_dtype", DTYPES)
def test_a_fused_step_has_the_bits_of_single_layers(checkpoint, monkeypatch, name, dtype, state_dtype, isa):
    use_isa(monkeypatch, isa)
    model, count = load_split(checkpoint(name), dtype=dtype), 150
    kv_cache, slots = filled(model, count, state_dtype)
    fused = FusedStep.of(model, kv_cache)
    assert fused is not None
    for at, few in enumerate((count, 40, 1, count)):  # pairs of blocks, blocks, threads that share one
        torch.set_num_threads(1 if few == 40 else THREADS)
        some, other, ones = slots[:few], slots[:few] + count, np.ones(few, np.int32)
        inputs = torch.arange(few) + 7 + at, torch.tensor([kv_cache.length(int(s)) for s in some]), torch.arange(few)
        before = kv_cache.bytes_read
        plain = by_layers(model, kv_cache, some, ones, inputs)
        once = kv_cache.bytes_read - before
        kv_cache.extend(other, ones)
        assert torch.equal(run_fused(model, fused, other, inputs), plain)
        assert kv_cache.bytes_read - before == 2 * once
    kv_cache.check()


def test_states_count_when_threads_are_compared(checkpoint, monkeypatch):
    monkeypatch.setattr(fused_step, "LAYER_BYTES", 0)
    model = load_split(checkpoint("qwen3_5"), dtype="float32")
    fused = FusedStep.of(model, opened(model, 4))
    moved = moved_bytes(fused.kv_cache)
    state = int(moved.states / moved.token)
    assert state > 0
    assert fused.suits([3] * 4 * THREADS)
    assert fused.suits([state // 10] + [1] * (THREADS - 1))  # the states of all are as large
    assert not fused.suits([1])
    torch.set_num_threads(1)
    assert fused.suits([1 << 22])


def test_wrong_calls_are_refused(checkpoint):
    model = load_split(checkpoint("qwen3_5"), dtype="float32")
    kv_cache, slots = filled(model, 2)
    fused, ones = FusedStep.of(model, kv_cache), np.ones(2, np.int32)
    inputs = torch.arange(2), torch.full((2,), 5), torch.arange(2)
    with pytest.raises(ValueError, match="slot 0: layer 0 has seen 5 of 5 tokens"):
        fused_states_alone(model, fused, slots, inputs)
    kv_cache.extend(slots, ones)
    with pytest.raises(ValueError, match="slot 9"):
        run_fused(model, fused, np.array([0, 9], np.int32), inputs)
    with pytest.raises(ValueError, match="slots: expected those of 2 tokens, got 1"):
        run_fused(model, fused, slots[:1], inputs)
    run_fused(model, fused, slots, inputs)  # the KV cache and the states are free again
    kv_cache.check()


def fused_states_alone(model, fused, slots, inputs):
    """Run a step for which the KV cache has been extended, but not the states."""
    kv_cache = fused.kv_cache.kv_cache
    kv_cache.extend(slots, np.ones(len(slots), np.int32))
    try:
        run_fused(model, fused, slots, inputs)
    finally:
        for slot in slots:
            kv_cache.truncate(int(slot), 5)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_job_mixes_fused_steps_with_others(checkpoint, monkeypatch, state_dtype):
    path = checkpoint("qwen3_5")
    fused_steps, run = [], FusedExecutor.run
    monkeypatch.setattr(FusedExecutor, "run", lambda self, *a: fused_steps.append(a[2].decodes) or run(self, *a))
    prompts = [{"prompt_token_ids": list(range(5 + i, 12 + 2 * i))} for i in range(24)]
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)

    def ids(batch):
        llm = LLM(path, batch=batch, threads=THREADS, mamba_ssm_cache_dtype=state_dtype)
        assert {s.state_dtype for s in llm._engine.setup.shapes if isinstance(s, RecurrentShape)} == {state_dtype}
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    together = ids(len(prompts))
    assert len(fused_steps) >= 5 and max(fused_steps) == len(prompts)
    monkeypatch.setattr(FusedExecutor, "suits", lambda self, step: False)
    fused_steps.clear()
    assert ids(7) == together and not fused_steps
