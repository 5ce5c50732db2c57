"""Beam search finds what transformers' does, whatever it is batched with, and leaves no block behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcdecode.errors import RowProblem
from hpcdecode.model import load_split
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from tests.support.samples import run

# Tokens of the prompt, tokens that end a hypothesis, fields.
ROWS = [
    (70, (), {"beam_width": 4, "max_tokens": 14}),
    (64, range(100, 140), {"beam_width": 3, "max_tokens": 20}),
    (9, range(5, 60), {"beam_width": 5, "max_tokens": 20, "length_penalty": 2.0}),
    (33, range(200, 260), {"beam_width": 2, "max_tokens": 25, "length_penalty": -0.5}),
    (5, (), {"beam_width": 3, "max_tokens": 1}),
    (40, range(30, 36), {"beam_width": 2, "max_tokens": 10}),
    (140, range(300, 400), {"beam_width": 4, "max_tokens": 16, "length_penalty": 0.0}),
]


def rows():
    draw = np.random.default_rng(8)
    return [
        Prompt(
            line,
            str(line),
            draw.integers(5, 512, length).tolist(),
            SamplingParams(ignore_eos=True, stop_token_ids=tuple(ends), **fields),
        )
        for line, (length, ends, fields) in enumerate(ROWS, 1)
    ]


@torch.inference_mode()
def searched(model, prompt):
    """Token ids of the hypotheses and their scores, best first."""
    params = prompt.params
    made = model.generate(
        torch.tensor([prompt.token_ids]),
        attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        length_penalty=params.length_penalty,
        max_new_tokens=params.max_tokens,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=511,
        do_sample=False,
        early_stopping=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for ids in made.sequences[:, len(prompt.token_ids) :].tolist():
        end = next((i + 1 for i, token in enumerate(ids) if token in params.stop_token_ids), len(ids))
        found.append(ids[:end])
    return found, made.sequences_scores.tolist()


@pytest.mark.parametrize("lanes", [1, 2])
def test_beams_are_those_of_transformers(checkpoint, lanes):
    reference = AutoModelForCausalLM.from_pretrained(checkpoint("llama3"), dtype=torch.float32).eval()
    made, _ = run(load_split(checkpoint("llama3"), dtype="float32"), rows(), lanes=lanes, shared=1000)
    ends = set()
    for prompt in rows():
        expected, scores = searched(reference, prompt)
        found = [made[prompt.line, sample] for sample in range(prompt.params.beam_width)]
        assert [s.generated for s in found] == expected, prompt.line
        for sequence, score in zip(found, scores, strict=True):
            length = len(sequence.generated) ** prompt.params.length_penalty
            assert sequence.cumulative_logprob / length == pytest.approx(score, abs=1e-4)
        for sequence in found:
            stopped = sequence.generated[-1] in prompt.params.stop_token_ids
            assert (sequence.finish_reason, sequence.hidden.tokens) == (("stop", 1) if stopped else ("length", 0))
            ends.add(sequence.finish_reason)
    assert ends == {"stop", "length"}


def test_beams_for_which_too_few_tokens_go_on(checkpoint):
    """All tokens but one end a hypothesis, and that is the likeliest, so that only one beam of four may go on."""
    model, draw = load_split(checkpoint("llama3"), dtype="float32"), np.random.default_rng(9)
    ids = draw.integers(5, 512, 40).tolist()
    made, _ = run(model, [Prompt(1, "1", ids, SamplingParams(max_tokens=1, ignore_eos=True))])
    (likeliest,) = made[1, 0].generated
    ends = tuple(token for token in range(model.vocab_size) if token != likeliest)
    fields = {"beam_width": 4, "max_tokens": 6, "ignore_eos": True, "stop_token_ids": ends}
    made, _ = run(model, [Prompt(1, "1", ids, SamplingParams(**fields)), rows()[1]], shared=1000)
    found = [made[1, sample] for sample in range(4)]
    assert len({tuple(s.generated) for s in found}) == 4 and all(np.isfinite(s.cumulative_logprob) for s in found)
    assert all(set(s.generated[:-1]) <= {likeliest} for s in found)
    scores = [s.cumulative_logprob / len(s.generated) for s in found]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0.5}, "no temperature beside"),
        ({"n": 2}, "no n beside"),
        ({"logprobs": 1}, "no logprobs beside"),
    ],
)
def test_what_has_no_meaning_in_a_beam_search_is_refused(fields, named):
    with pytest.raises(RowProblem, match=named):
        SamplingParams(beam_width=4, **fields).check()
