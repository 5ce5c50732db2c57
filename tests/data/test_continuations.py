"""Rows that are scored: what they may ask for, where a continuation begins, and windows over long texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdecode.data.prompts.continuations import MAX_CONTINUATIONS
from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.rows import Row, RowError, read_rows
from hpcdecode.data.prompts.targets import windows
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt

DEMO = Path(__file__).parents[2] / "jobs" / "demo" / "model"
CONTEXT = 64
IDS = list(range(5, 5 + CONTEXT))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO)


@pytest.fixture
def made(tmp_path, tokenizer):
    def make(*rows, context=CONTEXT, **params):
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        read = read_rows([str(tmp_path / "p.jsonl")], SamplingParams(max_tokens=1, **params), score=True)
        return list(tokenized(read, tokenizer, context))

    return make


def continuations(prompt):
    """Tokens before each continuation, and its own."""
    found = {}
    for target in prompt.targets:
        for sample, last in zip(target.samples, target.last, strict=True):
            found[sample] = (target.input_ids[: target.start], [*target.input_ids[target.start :], last])
    return [found[sample] for sample in sorted(found)]


def as_lm_eval(tokenizer, context, continuation):
    """The rule of lm-eval's `_encode_pair`."""
    spaces = len(context) - len(context.rstrip())
    if spaces > 0:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    encode = tokenizer.backend
    before = encode(context)["input_ids"]
    return before, encode(context + continuation)["input_ids"][len(before) :]


@pytest.mark.parametrize("prompt", ["def f(x):", "def f(x): ", "a list of \n", "retu", "x" * 9, "  "])
def test_a_continuation_begins_where_lm_eval_has_it(tokenizer, made, prompt):
    texts = ["turn 1", " return x", "\n    return", "s of it", "  the end"]
    (found,) = made({"prompt": prompt, "continuations": texts})
    assert continuations(found) == [as_lm_eval(tokenizer, prompt, text) for text in texts]
    assert found.texts == texts and found.token_ids == continuations(found)[0][0]


def test_white_space_before_choices_stays_with_the_prompt_if_they_are_one_token_only_then(tokenizer, made):
    after_space, after_line, plain = made(
        {"prompt": "if x == ", "choices": ["1", "0"]},
        {"prompt": "if x:\n", "choices": ["a", "b"]},
        {"prompt": "if x:\n", "continuations": ["a", "b"]},
    )
    encode = tokenizer.backend
    before = encode("if x ==")["input_ids"]
    assert continuations(after_space) == [(before, [encode(f"if x == {c}")["input_ids"][-1]]) for c in "10"]
    line = encode("if x:\n")["input_ids"]
    assert continuations(after_line) == [(line, encode(f"if x:\n{c}")["input_ids"][len(line) :]) for c in "ab"]
    assert all(len(own) == 2 for _, own in continuations(plain))


def test_an_empty_prompt_is_the_token_that_texts_begin_with(tokenizer, made):
    found, whole = made({"prompt": "", "continuation": "import os"}, {"text": "import os"})
    ids = tokenizer.backend("import os")["input_ids"]
    assert ids[0] == tokenizer.backend.bos_token_id
    assert continuations(found) == [(ids[:1], ids[1:])] == continuations(whole)
    assert whole.token_ids == []


def test_continuations_that_differ_in_their_last_token_are_one_sequence(made):
    some, choices = made(
        {"prompt_token_ids": [5, 6], "continuation_token_ids": [[7, 8], [7, 9], [6, 9], [7, 8]]},
        {"prompt_token_ids": [5, 6], "logprob_token_ids": [9, 7, 8]},
    )
    assert [(t.input_ids, t.start, t.last, t.samples) for t in some.targets] == [
        ([5, 6, 7], 2, [8, 9, 8], [0, 1, 3]),
        ([5, 6, 6], 2, [9], [2]),
    ]
    assert [(t.input_ids, t.last) for t in choices.targets] == [([5, 6], [9, 7, 8])]
    assert (some.sequences, some.input_tokens) == (2, 6)


def rolling(token_ids, size):
    """Inputs and what they predict, by lm-eval's `get_rolling_token_windows` with the text's first token before it."""
    (prefix, *tokens), done, found = token_ids, 0, []
    while done < len(tokens):
        count = min(size, len(tokens) - done)
        end = done + count
        before = [prefix, *tokens][: end - 1 + 1] if not done else tokens[max(end - size - 1, 0) : end - 1]
        before = before[: len(before) - (count - 1)]  # make_disjoint_window
        found.append((before, tokens[done:end]))
        done = end
    return found


@pytest.mark.parametrize("length", [2, 63, 64, 65, 66, 128, 129, 130, 200])
def test_windows_score_every_token_but_the_first_once_as_lm_eval_rolls(length):
    ids = [i * i % 97 for i in range(length)]
    found = list(windows(ids, CONTEXT))
    assert [t for w in found for t in [*w.input_ids[w.start :], *w.last]] == ids[1:]
    assert all(len(w.input_ids) <= CONTEXT for w in found)
    assert [(w.input_ids[: w.start], [*w.input_ids[w.start :], *w.last]) for w in found] == rolling(ids, CONTEXT)


def test_the_context_holds_all_but_the_last_token(made):
    fits, too_long, cut, few = made(
        {"prompt_token_ids": IDS, "continuation_token_ids": [9]},
        {"prompt_token_ids": IDS, "continuation_token_ids": [9, 10]},
        {"prompt_token_ids": IDS, "continuation_token_ids": [9, 10], "truncate_prompt_tokens": -1},
        {"prompt_token_ids": IDS, "continuation_token_ids": [9, 10], "truncate_prompt_tokens": 3},
    )
    assert isinstance(fits, Prompt) and isinstance(too_long, RowError)
    assert "too long: expected at most 65 tokens together" in too_long.reason and "64 + 2" in too_long.reason
    assert continuations(cut) == [(IDS[1:], [9, 10])] and continuations(few) == [(IDS[-3:], [9, 10])]


def test_fields_of_sampling_mean_nothing_for_scores(made):
    found, own = made({"text": "a b", "temperature": 3, "n": 7, "stop": 5}, {"text": "a b", "logprobs": 4}, logprobs=1)
    assert (found.params.logprobs, own.params.logprobs) == (1, 4)
    assert found.params.n == 1 and found.sequences == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"continuation": "a"}, "expected exactly one of prompt, prompt_token_ids, messages"),
        ({"text": "a", "continuation": ""}, "continuation: expected a string that is not empty, got an empty one"),
        ({"prompt": "a", "continuation": 3}, "continuation: expected a string that is not empty, got an integer 3"),
        ({"prompt": "a", "continuations": ["b", ""]}, "continuations[1]: expected a string that is not empty"),
        ({"prompt": "a", "continuations": "b"}, "continuations: expected a list of strings, got a string"),
        ({"prompt": "a", "choices": []}, "choices: expected at least one element, got an empty list"),
        ({"prompt": "a", "choices": [" the list of"]}, "choices[0]: expected text of one token, got"),
        ({"prompt": "a", "choices": [" b"], "continuation": "c"}, "expected at most one of continuation,"),
        ({"prompt": "a", "continuation_token_ids": [1, -1]}, "continuation_token_ids: expected integers in"),
        ({"prompt": "a", "continuation_token_ids": [[1], 3]}, "continuation_token_ids: expected a list of token ids"),
        ({"prompt": "a", "continuation_token_ids": [[]]}, "continuation_token_ids: expected at least one element"),
        ({"prompt": "a", "continuation_token_ids": [1 << 20]}, "expected token ids in [0, 2048), got 1048576"),
        ({"prompt": "a", "logprob_token_ids": [[1]]}, "logprob_token_ids: expected integers in"),
        ({"prompt_token_ids": [5], "continuation": "b"}, "continuation: expected continuation_token_ids or"),
        ({"prompt_token_ids": [5]}, "expected a text of at least two tokens"),
        ({"prompt": "", "n": 2}, "prompt: expected a string that is not empty, got an empty one"),
        ({"prompt": "a", "continuations": ["b"] * (MAX_CONTINUATIONS + 1)}, "expected at most 1000 elements, got 1001"),
        (
            {"prompt": "retu", "continuation": "rn"},
            "continuation: expected text of at least one token behind the prompt",
        ),
        ({"prompt": "a " * 200, "continuation": "b"}, "too long: expected at most 65 tokens"),
        ({"prompt": "some words " * 90_000, "continuation": "b"}, "prompt too long: expected at most 63 tokens"),
    ],
)
def test_what_cannot_be_scored_is_an_error(made, row, reason):
    (error,) = made(row)
    assert isinstance(error, RowError) and reason in error.reason


def test_rows_that_generate_have_no_continuations(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "continuation": 7}\n')
    (row,) = read_rows([str(tmp_path / "p.jsonl")], SamplingParams(), quiet=True)
    assert isinstance(row, Row) and row.scored is None
