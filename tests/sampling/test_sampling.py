"""Sampling: the generator against published vectors, filters and draws against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.sampling.draw import draw_by_torch
from hpcdecode.sampling.logprobs import logprobs
from hpcdecode.sampling.philox import philox4x32, uniform
from hpcdecode.sampling.sampler import sample


def sequence(line=1, generated=0, sample=0, **params):
    prompt = Prompt(line=line, id=str(line), token_ids=[1], params=SamplingParams(**params))
    made = SequenceState(Request(prompt, 10**6, lane=0), sample=sample)
    made.generated = [0] * generated
    return made


# Known answers that Random123 publishes (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    got = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert got[0].tolist() == expected


def test_uniform_depends_on_every_part_of_its_address():
    base = np.array([3, 5, 0, 7], np.int64)
    addresses = np.stack([base + step for step in ([0] * 4, [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])])
    draws = uniform(*addresses.T)
    assert len(set(draws.tolist())) == 5
    assert ((draws > 0) & (draws < 1)).all()
    assert uniform(*addresses[2:3].T)[0] == draws[2]


def test_greedy_is_argmax_beside_random_rows():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = [sequence(), sequence(line=2, temperature=1.0), sequence(line=3), sequence(line=4, temperature=0.3)]
    tokens = sample(logits, rows)
    assert [tokens[0], tokens[2]] == logits.argmax(1)[[0, 2]].tolist()


@pytest.mark.parametrize("temperature", [1e-30, 1e-39, 1e-45, 1e-300, 5e-324])
def test_temperatures_that_floats_cannot_divide_by_leave_the_largest(temperature):
    logits = 20 * torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    asked = ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1})
    params = [SamplingParams(temperature=temperature, **fields) for fields in asked]
    rows = [sequence(temperature=temperature, **fields) for fields in asked]
    assert sample(logits, rows) == logits.argmax(1).tolist()
    assert draw_by_torch(logits, params, torch.full((4,), 0.5)).tolist() == logits.argmax(1).tolist()


def test_top_k_and_top_p_admit_what_their_definition_admits():
    weights = torch.tensor([[0.05, 0.4, 0.3, 0.15, 0.1]])
    seen = {"k": set(), "p": set(), "both": set()}
    for position in range(400):
        for name, params in {
            "k": {"top_k": 3},
            "p": {"top_p": 0.75},
            "both": {"top_k": 2, "top_p": 0.6},
        }.items():
            row = sequence(generated=position, temperature=1.0, **params)
            seen[name].add(sample(weights.log(), [row])[0])
    assert seen == {"k": {1, 2, 3}, "p": {1, 2, 3}, "both": {1, 2}}


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1])
    temperature, draws = 0.7, 20_000
    rows = [sequence(line=line, temperature=temperature, seed=11) for line in range(1, draws + 1)]
    tokens = sample(logits.expand(draws, -1), rows)
    expected = torch.softmax(logits / temperature, 0).numpy() * draws
    chi2 = ((np.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum()
    assert chi2 < 18.5  # 0.999 quantile with 4 degrees of freedom


def test_a_draw_does_not_depend_on_its_batch():
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(1))
    rows = [sequence(line=i, generated=i % 5, temperature=0.9, top_p=0.9, top_k=50) for i in range(1, 65)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone


@pytest.mark.parametrize("vocabulary", [49_152, 128_256])
def test_log_probabilities_of_a_row_do_not_depend_on_the_others(vocabulary):
    """Torch adds up a single row of so many numbers on several threads, each a part of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        logits = 5 * torch.randn(48, vocabulary, generator=torch.Generator().manual_seed(0))
        whole = list(logprobs(logits, range(48), [1] * 48))
        for some in (1, 2, 7):
            parts = [range(first, min(first + some, 48)) for first in range(0, 48, some)]
            assert [e for p in parts for e in logprobs(logits[p.start : p.stop], p, [1] * len(p))] == whole, some
    finally:
        torch.set_num_threads(before)
