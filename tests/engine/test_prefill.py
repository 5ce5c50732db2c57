"""What the S-rank keeps of prompts in prefill, and that it attends as the reference store does."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

from hpcdecode.attention.base import KV_DTYPES, LATENT_KV_DTYPES
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.engine.prefill import PromptKvCache, StoredPrompts
from hpcdecode.engine.resumed import ResumedAttention
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.schedule.step import Chunk
from tests.support.attention_cases import expected, make_batch

SHAPE = LayerShape(2, 16, 20, 6, 0.2, window=70, sinks=True)


def sequence(length):
    return SequenceState(Request(Prompt(1, "1", [1] * length, SamplingParams()), 4, lane=0))


@pytest.mark.parametrize("chunks", [[300], [1, 130, 100, 69]])
def test_a_prompt_attends_as_in_the_reference_store(chunks):
    shape, length = SHAPE, 300
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(length, shape.q_columns, generator=generator)
    k = torch.randn(length, shape.kv_heads * shape.k_dim, generator=generator)
    v = torch.randn(length, shape.kv_heads * shape.v_dim, generator=generator)
    sinks = torch.randn(shape.q_heads, generator=generator)
    expected = torch.empty(length, shape.out_columns)
    store = open_kv_cache([shape], kv_dtype="float32", capacity_tokens=512, max_sequences=1, backend="reference")
    slots, counts = np.array([0], np.int32), np.array([length], np.int32)
    store.extend(slots, counts)
    store.attend(0, slots, counts, torch.cat((q, k, v), 1), expected, sinks)

    cache, prompt, at = PromptKvCache(CpuPromptAttention([shape], dtype="float32")), sequence(length), 0
    got = torch.full_like(expected, float("nan"))
    for count in chunks:
        chunk, rows = Chunk(prompt, at, count).part, slice(at, at + count)
        cache.attend(0, [chunk], q[rows], k[rows], v[rows], got[rows], sinks)
        cache.finish([chunk])
        prompt.prefilled = at = at + count
        assert cache.tokens == (0 if at == length else at)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_prompts_of_one_step_do_not_disturb_each_other():
    """Whole prompts share memory that is taken again at every layer; prompts in parts keep theirs."""
    layers, lengths = [LayerShape(1, 8, 8, 2, 0.3), LayerShape(2, 24, 8, 2, 0.3)], (70, 5, 130, 64)
    generator = torch.Generator().manual_seed(4)
    rows = [
        [torch.randn(sum(lengths), n, generator=generator) for n in (s.q_columns, s.kv_heads * s.k_dim, s.kv_heads * 8)]
        for s in layers
    ]

    def attend(steps):
        """Outputs of every layer; steps: [(prompt, start, count)] of every step."""
        cache, prompts = PromptKvCache(CpuPromptAttention(layers, dtype="float32")), [sequence(n) for n in lengths]
        out = [torch.full((sum(lengths), s.out_columns), float("nan")) for s in layers]
        for step in steps:
            chunks = [Chunk(prompts[i], start, count) for i, start, count in step]
            at = torch.cat([torch.arange(n) + sum(lengths[:i]) + start for i, start, n in step])
            for layer, (q, k, v) in enumerate(rows):
                o = torch.empty(len(at), out[layer].shape[1])
                cache.attend(layer, [chunk.part for chunk in chunks], q[at], k[at], v[at], o, None)
                out[layer][at] = o
            cache.finish([chunk.part for chunk in chunks])
            for chunk in chunks:
                chunk.sequence.prefilled += chunk.count
        assert cache.tokens == 0
        return out

    alone = attend([[(i, 0, n)] for i, n in enumerate(lengths)])
    together = attend([[(0, 0, 70), (1, 0, 5), (2, 0, 31)], [(2, 31, 99), (3, 0, 64)]])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [[140], [30, 80, 30], [120, 1, 19]])
def test_generated_tokens_attend_as_in_decoding(kv_dtype, dtype, chunks):
    """To the same bits, in one chunk with prompt tokens or without; prompt tokens stay as they are."""
    layers, prompt, generated = [SHAPE, LayerShape(1, 32, 32, 5, 0.3)], 90, 50
    if kv_dtype in LATENT_KV_DTYPES:
        layers.append(LayerShape(1, 40, 32, 20, 0.2, latent=True))

    def open_cache(tokens):
        return open_kv_cache(layers, kv_dtype=kv_dtype, capacity_tokens=tokens, max_sequences=1)

    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(prompt + generated, s.row_columns, generator=generator).to(dtype) for s in layers]
    sinks = [torch.randn(s.q_heads, generator=generator) if s.sinks else None for s in layers]
    wanted, decoding = [], open_cache(prompt + generated)
    decoding.extend([0], [prompt])
    for layer, (s, qkv) in enumerate(zip(layers, rows, strict=True)):
        decoding.append(layer, [0], [prompt], qkv[:prompt, s.q_columns :].contiguous())
        wanted.append(torch.empty(generated, s.out_columns, dtype=dtype))
    for i in range(generated):
        decoding.extend([0], [1])
        for layer, qkv in enumerate(rows):
            decoding.attend(layer, [0], [1], qkv[prompt + i : prompt + i + 1], wanted[layer][i : i + 1], sinks[layer])

    resumed, attention = sequence(prompt), ResumedAttention(open_cache)
    resumed.generated, resumed.resumed = [1] * generated, generated
    got = [torch.full((prompt + generated, s.out_columns), 7.0, dtype=dtype) for s in layers]
    for at, count in zip(accumulate(chunks, initial=0), chunks, strict=False):
        chunk, part = Chunk(resumed, at, count).part, slice(at, at + count)
        for layer, s in enumerate(layers):
            q, k, v = rows[layer][part].split((s.q_columns, s.k_columns, s.v_columns), 1)
            attention.attend(layer, chunk, q, k, v, got[layer][part], sinks[layer])
        attention.finish(chunk)
    assert not attention._caches
    for one, other in zip(wanted, got, strict=True):
        assert (other[:prompt] == 7).all() and torch.equal(one, other[prompt:])


@pytest.mark.parametrize("kv_dtype", LATENT_KV_DTYPES)
@pytest.mark.parametrize("latent", [False, True])
def test_prompts_see_what_the_cache_gives_back(kv_dtype, latent):
    """A prompt attends over K and V as a narrower cache has them, those in latents too."""
    shape, length = LayerShape(1, 48, 32, 6, 0.2, latent=latent), 70
    batch = make_batch(shape, [length], [length])
    q, k, v = batch.rows[0].split((shape.q_columns, shape.k_columns, shape.v_columns), 1)
    prompts = StoredPrompts(CpuPromptAttention([shape], dtype="float32"), [shape], kv_dtype)
    packed, out = (
        torch.zeros(prompts.packed_bytes(0, length), dtype=torch.uint8),
        torch.empty(length, shape.out_columns),
    )
    prompts.attend(0, [packed], [0], [length], q, k, v, out)
    assert (out - expected(batch, kv_dtype)).abs().max() < 1e-5
