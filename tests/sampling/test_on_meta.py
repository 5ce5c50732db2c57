"""Sampling on a device reads nothing back: on the meta device there is nothing to read."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.requests.params import SamplingParams
from hpcdecode.sampling.draw import draw_by_torch
from hpcdecode.sampling.sampler import argmax

WAYS = {
    "all": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [512, 50_000])
def test_the_most_likely_token(dtype, vocabulary):
    chosen = argmax(torch.empty(5, vocabulary, dtype=dtype, device="meta"))
    assert (chosen.shape, chosen.device.type) == ((5,), "meta")


def test_tokens_drawn_from_all():
    logits, uniforms = torch.empty(3, 1000, device="meta"), torch.empty(3, dtype=torch.float64, device="meta")
    tokens = draw_by_torch(logits, [WAYS["all"], WAYS["cold"], WAYS["all"]], uniforms)
    assert (tokens.shape, tokens.dtype, tokens.device.type) == ((3,), torch.int64, "meta")
