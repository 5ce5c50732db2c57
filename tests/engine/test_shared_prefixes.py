"""Prompts that begin with the same tokens: prefilled once, and every token as without sharing."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.model import load_split
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from tests.support.samples import run

# What a row begins with, tokens of its own, fields.
ROWS = [
    ("a", 3, {"max_tokens": 9}),
    ("ab", 40, {"max_tokens": 20}),
    ("", 150, {"max_tokens": 9}),
    ("a", 64, {"max_tokens": 7, "n": 3, "temperature": 0.9}),
    ("ab", 1, {"max_tokens": 12, "n": 2, "temperature": 1.1}),
    ("a", 20, {"max_tokens": 5, "prompt_logprobs": 1, "logprobs": 2}),
    ("c", 9, {"max_tokens": 15}),
    ("ab", 70, {"max_tokens": 4, "logprobs": 1}),
    ("c", 33, {"max_tokens": 1}),
    ("a", 0, {"max_tokens": 3}),
    ("a", 0, {"max_tokens": 6, "temperature": 0.6}),
]


def prompts():
    draw = np.random.default_rng(11)
    parts = {name: draw.integers(5, 200, 192).tolist() for name in "abc"}
    return [
        Prompt(
            line,
            str(line),
            [t for part in begin for t in parts[part]] + draw.integers(5, 200, own).tolist(),
            SamplingParams(ignore_eos=True, seed=2, **fields),
        )
        for line, (begin, own, fields) in enumerate(ROWS, 1)
    ]


def tokens(sequences):
    return {key: s.generated for key, s in sequences.items()}


@pytest.mark.parametrize("name", ["llama3", "gemma2", "deepseek_v3", "glm_moe_dsa", "deepseek_v4"])
def test_tokens_are_the_same_with_and_without_sharing(checkpoint, name):
    model = load_split(checkpoint(name), dtype="float32")
    apart, worker = run(model, prompts())
    assert sum(s.shared_tokens for s in worker.schedulers) == 0
    for lanes in (1, 2):
        shared, worker = run(model, prompts(), lanes=lanes, shared=2000)
        assert tokens(shared) == tokens(apart)
        assert sum(s.shared_tokens for s in worker.schedulers) >= 192
        for key, sequence in shared.items():
            if sequence.logprobs is not None:
                np.testing.assert_allclose(sequence.logprobs.chosen, apart[key].logprobs.chosen, atol=1e-4)
    assert len(shared[6, 0].prompt_logprobs) == 212


@pytest.mark.parametrize(
    ("name", "interrupted"),
    [("llama3", (6, 30, 60)), ("minicpm3", (30,)), ("deepseek_v32", (30,)), ("deepseek_v4", (30,))],
)
def test_an_interrupted_job_shares_what_it_prefills_again(checkpoint, name, interrupted):
    model = load_split(checkpoint(name), dtype="float32")
    whole, _ = run(model, prompts())
    for steps in interrupted:
        done, worker = run(model, prompts(), steps=steps, shared=2000)
        again = prompts()
        for entry in worker.unfinished():
            again[entry.line - 1].unfinished.append(entry)
        rest, _ = run(model, [p for p in again if (p.line, 0) not in done], shared=2000)
        assert tokens(done | rest) == tokens(whole)
