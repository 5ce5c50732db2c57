"""Scores are those of transformers' log_softmax, whatever is run together, and cost no decode step."""

from __future__ import annotations

import dataclasses
from math import exp

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcdecode import LLM, PromptError, SamplingParams
from hpcdecode.engine import model_inputs
from hpcdecode.model import load_split
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.target import Target
from tests.support.samples import run

CONTEXT = 1024


def ids(length, *, seed=1):
    return np.random.default_rng(seed).integers(5, 400, length).tolist()


HEADER = ids(200, seed=9)
ROWS = [
    {"prompt_token_ids": ids(300)},
    {"prompt_token_ids": ids(40), "continuation_token_ids": [ids(9, seed=2), ids(1, seed=3), ids(30, seed=4)]},
    {"prompt_token_ids": ids(90), "logprob_token_ids": [7, 300, 41, 7], "logprobs": 3},
    {"prompt_token_ids": [9], "continuation_token_ids": [8]},
    *({"prompt_token_ids": [*HEADER, i], "continuation_token_ids": [[3, i], [4, 5, 6]]} for i in range(6)),
    {"prompt": "def f(x): ", "continuations": ["return x", "pass"]},
    {"text": "import os, sys"},
    {"prompt_token_ids": ids(5), "logprob_token_ids": ids(70, seed=6)},
]


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint("llama3"), dtype="float32", kv_memory="16M", threads=1)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint("llama3"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def together(llm):
    return llm.score(ROWS, use_tqdm=False)


def require_parity(model, before, output):
    """Compare an output with the log_softmax of transformers' logits; before: tokens that come first."""
    given = torch.tensor([*before, *output.token_ids])
    with torch.inference_mode():
        expected = model(given[None]).logits[0].log_softmax(dim=-1)
    first = max(len(before), 1)
    chosen = expected[first - 1 : -1].gather(1, given[first:, None])[:, 0]
    held = output.logprobs if before else output.logprobs[1:]
    assert before or output.logprobs[0] is None
    found = [each[token] for each, token in zip(held, given[first:].tolist(), strict=True)]
    np.testing.assert_allclose(found, chosen.numpy(), atol=1e-4, rtol=0)
    assert output.cumulative_logprob == pytest.approx(float(chosen.double().sum()), abs=1e-4 * len(found))
    assert output.perplexity == pytest.approx(exp(-output.cumulative_logprob / len(found)))
    assert output.is_greedy == bool((expected[first - 1 : -1].argmax(-1) == given[first:]).all())


def test_scores_are_those_of_transformers(together, reference):
    for found in together:
        for index, output in enumerate(found.outputs):
            assert output.index == index
            require_parity(reference, found.prompt_token_ids, output)
        sums = [output.cumulative_logprob for output in found.outputs]
        assert found.best == sums.index(max(sums))
    assert [len(found.outputs) for found in together] == [1, 3, 4, 1, *[2] * 6, 2, 1, 70]
    assert together[10].outputs[1].text == "pass" and together[11].prompt == "import os, sys"


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "qwen3_next"])
def test_other_kinds_of_attention_and_layers_with_states(checkpoint, name):
    reference = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
    model = LLM(checkpoint(name), dtype="float32", kv_memory="16M", threads=1, prefill_tokens=64)
    rows = [ROWS[0], ROWS[1], {"prompt_token_ids": ids(150, seed=2), "continuation_token_ids": [[3, 4], [9, 9, 9]]}]
    for found in model.score(rows, use_tqdm=False):
        for output in found.outputs:
            require_parity(reference, found.prompt_token_ids, output)


def test_the_likeliest_tokens_come_along(together):
    first, *_ = together[2].outputs
    assert len(first.logprobs[0]) in (3, 4) and together[2].outputs[0] == dataclasses.replace(
        together[2].outputs[3], index=0
    )


def test_what_greedy_decoding_gives_is_greedy(llm, reference):
    prompts = [ids(n, seed=n) for n in (3, 20, 70)]
    greedy = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0), use_tqdm=False)
    made = [found.outputs[0] for found in greedy]
    rows = [
        {"prompt_token_ids": p, "continuation_token_ids": [m.token_ids, [*m.token_ids[:5], (m.token_ids[5] + 1) % 400]]}
        for p, m in zip(prompts, made, strict=True)
    ]
    for found, own in zip(llm.score(rows, use_tqdm=False), made, strict=True):
        assert [output.is_greedy for output in found.outputs] == [True, False]
        assert found.outputs[0].cumulative_logprob == pytest.approx(own.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("options", [{"batch": 3}, {"prefill_tokens": 7}, {"batch": 5, "period": 4}])
def test_a_row_scores_the_same_in_any_company(checkpoint, together, options):
    other = LLM(checkpoint("llama3"), dtype="float32", kv_memory="16M", threads=1, **options)
    backwards = other.score(ROWS[::-1], use_tqdm=False)[::-1]
    alone = [other.score(row, use_tqdm=False)[0] for row in ROWS[:3]]
    for found, expected in zip([*backwards, *alone], [*together, *together[:3]], strict=True):
        assert [repr(o) for o in found.outputs] == [repr(o) for o in expected.outputs]


def test_logits_are_computed_part_by_part(llm, together, monkeypatch):
    made = []
    monkeypatch.setattr(model_inputs, "LOGITS_AT_ONCE", 16)
    model = llm._engine.model
    start = model.start_last

    def start_last(o, context, part):
        made.append(part.stop - part.start)
        return start(o, context, part)

    monkeypatch.setattr(model, "start_last", start_last)
    found = llm.score(ROWS[:2], use_tqdm=False)
    assert max(made) == 16 and sum(made) == 299 + 9 + 1 + 30
    assert [repr(f.outputs) for f in found] == [repr(f.outputs) for f in together[:2]]


@pytest.mark.parametrize("shared", [0, 1000])
def test_continuations_share_the_prefill_of_their_prompt_and_nothing_is_decoded(checkpoint, shared):
    prompt, ends = ids(650), [[i, 7] for i in range(5, 15)]
    targets = [Target.of([*prompt, *end], len(prompt), sample) for sample, end in enumerate(ends)]
    row = Prompt(1, "1", prompt, SamplingParams(max_tokens=1), targets=targets)
    done, worker = run(
        load_split(checkpoint("llama3"), dtype="float32"), [row], batch=16, shared=shared, capacity=1 << 14
    )
    assert (len(done), worker.decode_tokens) == (len(ends), 0)
    assert sum(s.shared_tokens for s in worker.schedulers) == (640 * (len(ends) - 1) if shared else 0)
    assert all(len(s.scores.body) == len(s.scores.ends) == 1 for s in done.values())


def test_rows_that_leave_prefixes_behind_make_room_for_those_of_others(checkpoint):
    rows = []
    for line in range(1, 17):
        prompt = ids(150, seed=line)
        targets = [Target.of([*prompt, i, i], len(prompt), i - 5) for i in range(5, 8)]
        rows.append(Prompt(line, str(line), prompt, SamplingParams(max_tokens=1), targets=targets))
    model = load_split(checkpoint("llama3"), dtype="float32")
    done, worker = run(model, rows, batch=9, shared=1 << 14, capacity=1 << 14)
    assert len(done) == 48 and sum(s.shared_tokens for s in worker.schedulers) == 16 * 2 * 128


def test_texts_beyond_the_context_roll(llm, reference):
    text = ids(CONTEXT + 300, seed=12)
    (found,) = llm.score(text, use_tqdm=False)
    output = found.outputs[0]
    assert output.token_ids == text and output.logprobs[0] is None
    with torch.inference_mode():
        first = reference(torch.tensor([text[:CONTEXT]])).logits[0].log_softmax(dim=-1)
        last = reference(torch.tensor([text[-CONTEXT - 1 : -1]])).logits[0].log_softmax(dim=-1)
    got = [by_token[token] for by_token, token in zip(output.logprobs[1:], text[1:], strict=True)]
    expected = [float(first[i, token]) for i, token in enumerate(text[1 : CONTEXT + 1])]
    expected += [float(last[CONTEXT - 299 + i, token]) for i, token in enumerate(text[CONTEXT + 1 :])]
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


def test_a_prompt_that_cannot_be_scored_is_refused(llm, checkpoint):
    with pytest.raises(PromptError, match="prompt 2: choices: expected a list of strings, got an integer 3"):
        llm.score(["a b", {"prompt": "a", "choices": 3}])
    small = LLM(checkpoint("llama3"), dtype="float32", kv_memory="512K", threads=1)
    with pytest.raises(PromptError, match=r"KV cache of an R-rank: expected at most .* tokens, got 1000;"):
        small.score([ids(1001)])
