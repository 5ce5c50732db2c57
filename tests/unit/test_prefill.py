"""The S-rank's attention of prompts: against plain attention, whole and in chunks; and what it keeps of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode.attention import LayerShape, open_store
from hpcdecode.data.tokens import Prompt
from hpcdecode.sampling.params import SamplingParams
from hpcdecode.schedule.injector import Chunk
from hpcdecode.schedule.sequence import Sequence
from hpcdecode.workers.prefill import PrefillCache

SHAPES = {
    "mha": LayerShape(4, 16, 16, 4, 0.25),
    "gqa": LayerShape(2, 16, 16, 6, 0.2),
    "window": LayerShape(2, 16, 16, 4, 0.25, window=40),
    "softcap": LayerShape(2, 16, 16, 4, 0.25, softcap=3.0),
    "sinks and window": LayerShape(2, 16, 16, 4, 0.25, window=50, sinks=True),
    "k_dim != v_dim": LayerShape(4, 24, 20, 4, 0.25),
}


def sequence(length):
    return Sequence(Prompt(1, "1", [1] * length, SamplingParams()), 4, 0, 0, 0, 0)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("chunks", [[300], [1, 130, 100, 69]])
def test_prompts_attend_as_the_reference_store_does(name, chunks):
    shape, length = SHAPES[name], 300
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(length, shape.q_columns, generator=generator)
    k = torch.randn(length, shape.kv_heads * shape.k_dim, generator=generator)
    v = torch.randn(length, shape.kv_heads * shape.v_dim, generator=generator)
    sinks = torch.randn(shape.q_heads, generator=generator) if shape.sinks else None
    expected = torch.empty(length, shape.out_columns)
    store = open_store([shape], kv_dtype="float32", capacity_tokens=512, max_sequences=1, backend="reference")
    slots, counts = np.array([0], np.int32), np.array([length], np.int32)
    store.extend(slots, counts)
    store.attend(0, slots, counts, torch.cat((q, k, v), 1), expected, sinks)

    cache, prompt, at = PrefillCache([shape]), sequence(length), 0
    got = torch.full_like(expected, float("nan"))
    for count in chunks:
        chunk, rows = Chunk(prompt, at, count), slice(at, at + count)
        cache.attend(0, [chunk], q[rows], k[rows], v[rows], got[rows], sinks)
        cache.finish([chunk])
        prompt.prefilled = at = at + count
        assert cache.tokens == (0 if at == length else at)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
