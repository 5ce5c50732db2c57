"""Structured output: what a random model says at a temperature follows its schema, expression, choice or grammar."""

from __future__ import annotations

import json
import re
import sys
import time

import numpy as np
import pytest
import torch

from hpcdecode import LLM, PromptError, SamplingParams
from hpcdecode.data.prompts.fields import row_params
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import RowProblem
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.start import start_request
from hpcdecode.requests.stops import Stops
from hpcdecode.sampling.sampler import sample
from tests.support.models import EOS, VOCAB

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "é😀"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.load(checkpoint("llama3"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint("llama3"), dtype="float32", batch=16, kv_memory="16M", threads=1)


def made(llm, asked, count=12, **fields):
    params = SamplingParams(max_tokens=200, temperature=1.5, structured_outputs=asked, **fields)
    outputs = [o.outputs[0] for o in llm.generate([f"row {n}" for n in range(count)], params, use_tqdm=False)]
    assert {o.finish_reason for o in outputs} == {"stop"}
    return [o.text for o in outputs]


def test_objects_of_a_schema(llm):
    for asked in ({"json": SCHEMA}, {"json": json.dumps(SCHEMA)}):
        objects = [json.loads(text) for text in made(llm, asked)]
        for found in objects:
            assert found.keys() == {"name", "age", "tags"}
            assert isinstance(found["name"], str) and len(found["name"]) <= 8
            assert type(found["age"]) is int and 0 <= found["age"] <= 120
            assert len(found["tags"]) <= 3 and set(found["tags"]) <= {"red", "green", "é😀"}
        assert len({o["age"] for o in objects}) > 3


def test_a_regular_expression(llm):
    texts = made(llm, {"regex": r"(ab|cd){1,5}-[0-9]{2,4}x?"})
    assert all(re.fullmatch(r"(ab|cd){1,5}-[0-9]{2,4}x?", text) for text in texts) and len(set(texts)) > 6


def test_a_choice_and_a_grammar(llm):
    choice = ["yes", "no", 'may "be"\n', "日本 😀"]
    texts = made(llm, {"choice": choice}, count=24)
    assert set(texts) <= set(choice) and len(set(texts)) > 1
    balanced = made(llm, {"grammar": 'root ::= pair\npair ::= "(" pair ")" | "x"'})
    assert all(re.fullmatch(r"\(*x\)*", t) and t.count("(") == t.count(")") for t in balanced)


def test_rows_without_structure_beside_them_are_as_alone(llm):
    free = {"prompt": "def f(x):", "max_tokens": 9}
    (alone,) = llm.generate(free, use_tqdm=False)
    bound = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"choice": ["abc"]}}
    first, *others = llm.generate([free, bound, bound], use_tqdm=False)
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids
    assert [o.outputs[0].text for o in others] == ["abc", "abc"]


def test_a_grammar_wins_over_what_forbids_all_that_it_allows(llm):
    assert made(llm, {"choice": ["ok"]}, count=2, min_tokens=20, logit_bias={5: 3.0}, bad_words=("k",)) == ["ok"] * 2


def allowed_after(tokenizer, matcher, ids, vocabulary=VOCAB):
    """Whether each token may come after others."""
    matcher.follow(ids)
    (mask,) = tokenizer.grammars.allowed([matcher], vocabulary)
    return np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)[:vocabulary]


def test_allowed_tokens_are_those_that_lead_to_a_match(tokenizer):
    texts = [tokenizer.decode([token], False) for token in range(VOCAB)]
    numbers = [f"{n:0{width}}" for width in (1, 2) for n in range(10**width)]
    whole = {word + number for word in ("in", "int", "to") for number in numbers}
    begun = {text[:n] for text in whole for n in range(len(text) + 1)}
    draw = np.random.default_rng(3)
    for _ in range(20):
        matcher, ids, said = tokenizer.grammars.matcher({"regex": "(in|int|to)[0-9]{1,2}"}), [], ""
        while True:
            allowed = np.flatnonzero(allowed_after(tokenizer, matcher, ids))
            expected = {t for t in range(VOCAB) if t != EOS and texts[t] and said + texts[t] in begun}
            assert set(allowed) - {EOS} == expected
            assert (EOS in allowed) == (said in whole)
            token = int(draw.choice(allowed))
            if token == EOS:
                break
            ids, said = [*ids, token], said + texts[token]
        assert said in whole


def test_masks_of_several_rows_are_those_of_each_alone_on_threads_too(tokenizer):
    ids = [tokenizer.encode_texts([text], add_special_tokens=False)[0] for text in ("ab", "in", "a", "int1", "f")]
    ids += [[], ids[0]]
    asked = [{"regex": "[a-f]{1,9}"}, {"regex": "(in|int|to)[0-9]{1,2}"}]
    kinds = [0, 1, 0, 1, 0, 1, 1]  # the last one cannot be followed
    found = []
    for threads in (1, 4):
        matchers = [tokenizer.grammars.matcher(asked[kind]) for kind in kinds]
        for matcher, own in zip(matchers, ids, strict=True):
            matcher.follow(own)
        found.append(tokenizer.grammars.allowed(matchers, VOCAB, threads))
        assert [matcher.problem is None for matcher in matchers] == [True] * 6 + [False]
    alone = [allowed_after(tokenizer, tokenizer.grammars.matcher(asked[k]), i) for k, i in zip(kinds, ids, strict=True)]
    assert np.array_equal(found[0], found[1])
    for mask, expected in zip(found[0][:6], alone, strict=False):
        assert np.array_equal(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool), expected)


def test_a_continued_sequence_knows_what_it_has_said(tokenizer):
    asked = {"regex": "[a-f]{4,9}"}
    ids = tokenizer.encode_texts(["abcde"], add_special_tokens=False)[0]
    stepwise, at_once = tokenizer.grammars.matcher(asked), tokenizer.grammars.matcher(asked)
    for count in range(len(ids) + 1):
        last = allowed_after(tokenizer, stepwise, ids[:count])
    assert (allowed_after(tokenizer, at_once, ids) == last).all() and 0 < last.sum() < VOCAB
    params = SamplingParams(structured_outputs=asked)
    prompt = Prompt(1, "1", [7], params, [Unfinished(1, 0, ids)])
    (sequence,) = start_request(prompt, 9, 0, Stops(frozenset([EOS]))).sequences
    (token,) = sample(torch.randn(1, VOCAB), [sequence], frozenset([EOS]), tokenizer.grammars)
    assert last[token]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, {"json": SCHEMA}),
        ({"type": "text"}, None),
    ],
)
def test_the_openai_format(fields, expected):
    assert row_params({"response_format": fields}, SamplingParams()).structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"structured_outputs": {}}, "expected one of json, json_object, regex, choice, grammar, got none"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "got json, regex"),
        ({"structured_outputs": {"yaml": "a"}}, "got yaml"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: expected a list"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex: expected a string"),
        ({"structured_outputs": "a"}, "structured_outputs: expected an object"),
        ({"response_format": {"type": "xml"}}, "response_format: expected an object with type text"),
        ({"response_format": {"type": "json_schema"}}, "response_format: expected"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, "got both"),
    ],
)
def test_what_a_row_may_not_ask(fields, expected):
    with pytest.raises(RowProblem, match=expected):
        row_params(fields, SamplingParams())


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "nonsense"}},
        {"json": "{broken"},
        {"json": {"$ref": "http://localhost/none"}},
        {"regex": "(a"},
        {"regex": "a(?=b)"},
        {"grammar": "!!"},
        {"grammar": "start: missing"},
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_row(tokenizer, asked):
    with pytest.raises(RowProblem, match="structured_outputs: expected what llguidance can compile, got: "):
        tokenizer.check_params(SamplingParams(structured_outputs=asked))


def test_without_the_extra_it_says_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RowProblem, match=r"pip install 'hpcdecode\[structured\]'"):
        Tokenizer.load(checkpoint("llama3")).check_params(SamplingParams(structured_outputs={"regex": "a"}))


# llguidance compiles these, and finds out later that it cannot follow them.
UNFOLLOWED = {
    "from the first token": ({"json": {"$ref": "#"}}, "NoExtensionBias"),
    "after some": ({"choice": ["x" * 1_000_000, "y" * 1_000_000]}, "lexer error: too many expressions"),
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_a_grammar_that_cannot_be_followed_is_an_error_of_its_row(llm, name):
    """The sequence ends there; its text would look like one that follows the grammar."""
    asked, problem = UNFOLLOWED[name]
    with pytest.raises(PromptError, match=f"structured_outputs: the grammar cannot be followed: {problem}"):
        llm.generate({"prompt": "a", "structured_outputs": asked}, SamplingParams(max_tokens=9), use_tqdm=False)
    assert made(llm, {"choice": ["ok"]}, count=2) == ["ok"] * 2


RULES = 20_000
CHAIN = "".join(f"r{i}: r{i + 1} | /x/\n" for i in range(RULES))
HOSTILE = {
    "one that ends the process that compiles it": {"grammar": f"start: r0\n{CHAIN}r{RULES}: /y/"},
    "one that takes more than 5 s": {"json": {"type": "integer", "multipleOf": 1_999_993}},
}


@pytest.mark.parametrize("problem", HOSTILE)
def test_a_grammar_beyond_the_bounds_costs_its_row_alone_and_once(tokenizer, problem):
    params = SamplingParams(structured_outputs=HOSTILE[problem])
    with pytest.raises(RowProblem, match=problem):
        tokenizer.check_params(params)
    begin = time.monotonic()
    with pytest.raises(RowProblem, match=problem):
        tokenizer.check_params(params)
    assert time.monotonic() - begin < 1
    tokenizer.check_params(SamplingParams(structured_outputs={"regex": "[a-f]+"}))


def test_a_model_with_fewer_tokens_than_its_tokenizer(tokenizer):
    """Its rows follow their grammars with those that it has, and are told if none of them may come next."""
    asked = {"choice": ["yes"]}
    whole = allowed_after(tokenizer, tokenizer.grammars.matcher(asked), [])
    first = int(whole.nonzero()[0][0])
    for tokens in (first + 1, VOCAB - 40, VOCAB - 1):
        matcher = tokenizer.grammars.matcher(asked)
        assert np.array_equal(allowed_after(tokenizer, matcher, [], tokens), whole[:tokens]) and matcher.problem is None
    matcher = tokenizer.grammars.matcher(asked)
    allowed_after(tokenizer, matcher, [], first)
    assert matcher.problem == f"none of the model's {first} tokens may come next"
