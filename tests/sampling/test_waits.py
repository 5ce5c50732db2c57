"""How often a device is waited for in the sampling of a step: counted on the CPU, over the code of devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.start import start_request
from hpcdecode.requests.stops import Stops
from hpcdecode.sampling import draw, sampler
from hpcdecode.sampling.rows import rows_of
from hpcdecode.system.uploads import upload
from tests.support.launches import Waits


def sequences(*fields):
    prompts = [Prompt(i, str(i), [1, 2, 3], SamplingParams(**own)) for i, own in enumerate(fields, 1)]
    return [start_request(prompt, 9, 0, Stops()).sequences[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ([{"temperature": 0.0}] * 5, 1),
        ([{"temperature": 0.7}] * 5, 1),
        ([{"temperature": 0.7, "top_k": 20}] * 5, 2),
        ([{"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5}, {"temperature": 0.0}], 4),
        ([{"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {4: 2.0}, "min_tokens": 3}] * 4, 1),
        ([{"temperature": 0.9, "frequency_penalty": 0.5}, {"temperature": 0.0}], 1),
    ],
)
def test_sampling_waits_for_the_device_a_few_times(monkeypatch, fields, most):
    own, logits = sequences(*fields), 4 * torch.randn(len(fields), 3000, generator=torch.Generator().manual_seed(2))
    expected = sampler.sample(logits, own, frozenset([2]))

    def as_on_a_device(logits, rows, params, uniforms):
        return draw.draw_by_torch(rows_of(logits, rows), params, uniforms)

    monkeypatch.setattr(sampler, "draw", as_on_a_device)
    with Waits() as waits:
        assert sampler.sample(logits, own, frozenset([2])) == expected
    assert len(waits.calls) <= most, waits.calls


def test_arrays_go_to_a_device_in_one_copy():
    arrays = [np.arange(5), np.arange(3, dtype=np.float32).reshape(3, 1), np.array([], np.int64), np.ones(3, bool)]
    there = upload(torch.device("meta"), *arrays)
    assert [(x.shape, x.device.type) for x in there] == [(a.shape, "meta") for a in arrays]
    assert len({x.untyped_storage()._cdata for x in there}) == 1
    for x, array in zip(upload(torch.device("cpu"), *arrays), arrays, strict=True):
        assert np.array_equal(x.numpy(), array)
