"""Streamed messages whose parts are told apart: what is shown is always the begin of what the result says."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.engine.desk import result_of
from hpcdecode.requests.output_parser import EXTRACTS, MARKERS, NONE, OutputParser
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.serve.answers import message_of
from hpcdecode.serve.detokenizer import TokenKinds
from hpcdecode.serve.parts import part_stream
from tests.support.models import EOS, tokenizer

PIECES = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:", "Here's my response:", "Here"),
    *('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "<tool_call>", "<tool", '{"name": "f"', "{", "[x"),
    *('[TOOL_CALLS][{"name": "f", "arguments": {}}]', '{"name": "f", "parameters": {}}', "<|python_tag|>", "[TOOL"),
    *("<|channel|>analysis<|message|>", "<|end|>", "<|im_end|>", "<|im_", " ", "\n\n", "abc", "the end", "é", "🙂"),
]
SPECIAL = ["<|im_end|>", "<think>", "</think>", "[TOOL_CALLS]", "<|end|>"]


@cache
def kinds_of(reasoning: str, calls: str, special: bool) -> TokenKinds:
    backend = tokenizer()
    if special:
        backend.add_special_tokens({"additional_special_tokens": SPECIAL})
    made = Tokenizer(backend, frozenset([EOS]), len(backend))
    made.output_parser = OutputParser(reasoning, calls, backend.all_special_tokens)
    return TokenKinds(made)


def streamed(kinds, prompt, ids, steps):
    """Return the message of a row, and what was shown of it after each step, in all."""
    tokenizer = kinds.tokenizer
    stops = Stops(tokenizer.eos_token_ids, tokenizer.decode)
    sequence = SequenceState(Request(prompt, len(ids), 0))
    for token in ids:
        sequence.accept(token, stops)
        if sequence.finish_reason:
            break
    stream, shown, whole, at = part_stream(kinds, prompt), [], {}, 0
    while at < len(sequence.generated):
        count = next(steps)
        add(whole, stream.feed(sequence.generated[at : at + count]))
        shown.append(dict(whole))
        at += count
    message = message_of(result_of(sequence, tokenizer))
    add(whole, stream.rest(message))
    return message, shown, whole


def add(whole, delta):
    for name, value in delta.items():
        whole[name] = whole[name] + value if name in whole else value


def check(message, shown, whole):
    calls = whole.pop("tool_calls", None)
    assert [{k: v for k, v in call.items() if k != "index"} for call in calls or []] == message.pop("tool_calls", [])
    assert {name: value for name, value in message.items() if value} == whole
    for part in shown:
        assert all(message[name].startswith(value) for name, value in part.items())


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_is_shown_begins_the_message(data):
    reasoning = data.draw(st.sampled_from([NONE, *MARKERS]))
    calls = data.draw(st.sampled_from([NONE, *EXTRACTS] if reasoning != NONE else list(EXTRACTS)))
    kinds = kinds_of(reasoning, calls, data.draw(st.booleans()))
    encode = kinds.tokenizer.backend.encode
    pieces = data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8))
    ids = encode("".join(pieces), add_special_tokens=False)
    for at in data.draw(st.lists(st.integers(0, len(ids)), max_size=3)):
        ids.insert(at, data.draw(st.integers(0, len(kinds.tokenizer.backend) - 1)))
    begin = data.draw(
        st.sampled_from(
            ["", "<think>", "<think>\n\n</think>\n\n", "[THINK]\n", "[/THINK]", "Here is my thought process:"]
        )
    )
    params = SamplingParams(
        stop=tuple(data.draw(st.lists(st.sampled_from(["the", "end", "c</", "\n\n"]), max_size=2))),
        skip_special_tokens=data.draw(st.booleans()),
        ignore_eos=data.draw(st.booleans()),
    )
    prompt = Prompt(1, "1", encode("user: hi\n" + begin, add_special_tokens=False), params)
    steps = iter(lambda: data.draw(st.integers(1, 4)), 0)
    check(*streamed(kinds, prompt, ids, steps))


@pytest.mark.parametrize(
    ("parsers", "text", "early"),
    [
        (("deepseek_r1", NONE), "<think>I think of it.</think>\n\nAn answer.", ("I think of it.", "An answer.")),
        (("deepseek_r1", "hermes"), "<think>Hm.</think>Yes. <tool_call>{", ("Hm.", "Yes.")),
        (("granite", NONE), "Here's my thought process: Hm. Here is my response: Yes.", ("Hm.", "Yes.")),
        (("granite", NONE), "Hello, here", ("", "Hello, here")),
        ((NONE, "hermes"), "Of course.\n<tool_call>{", ("", "Of course.")),
        ((NONE, "llama3_json"), "Of course: {}", ("", "Of course: {}")),
        ((NONE, "llama3_json"), '{"name": "f"', ("", "")),
        (("qwen3", NONE), "No reasoning so far.", ("", "")),
        (("deepseek_r1", NONE), "It is reasoning so far.", ("It is reasoning so far.", "")),
        (("deepseek_r1", "hermes"), "Hm. </think>\n\nYes. <tool_call>{", ("Hm.", "Yes.")),
        (("openai_gptoss", "openai"), "<|channel|>final<|message|>Hi", ("", "")),
    ],
)
def test_parts_are_shown_as_soon_as_they_are_decided(parsers, text, early):
    kinds = kinds_of(*parsers, False)
    ids = kinds.tokenizer.backend.encode(text, add_special_tokens=False)
    prompt = Prompt(1, "1", [5], SamplingParams())
    message, shown, whole = streamed(kinds, prompt, ids, iter([1] * len(ids)))
    assert (shown[-1].get("reasoning", ""), shown[-1].get("content", "")) == early
    check(message, shown, whole)


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_content_is_shown_at_once_if_the_prompt_has_ended_the_reasoning(name):
    kinds = kinds_of(name, NONE, False)
    encode = kinds.tokenizer.backend.encode
    prompt = Prompt(1, "1", encode("<think>\n\n</think>\n\n", add_special_tokens=False), SamplingParams())
    ids = encode("It is </think>.", add_special_tokens=False)
    message, shown, whole = streamed(kinds, prompt, ids, iter([1] * len(ids)))
    assert whole == {"content": "It is </think>."} and len({part["content"] for part in shown if part}) > 5
    check(message, shown, whole)
