"""Reasoning and calls of tools in texts as the models' families write them; what is malformed stays in the content."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcdecode.requests.output_parser import (
    EXTRACTS,
    MARKERS,
    NONE,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputParser,
    chosen_parsers,
)

WEATHER = ("get_weather", {"city": "Paris", "unit": "celsius"})
TIME = ("get_time", {"zone": "Europe/Paris", "tag": "</tool_call> }] é"})


def parsed(text, reasoning=NONE, calls=NONE, prompt="", **options):
    parts = OutputParser(reasoning, calls, **options)(
        text, list(prompt.encode()), "7-0", lambda ids: bytes(ids).decode()
    )
    named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parts.tool_calls]
    return parts.reasoning, parts.content, named


def written(call, arguments="arguments", **more):
    return json.dumps({"name": call[0], arguments: call[1], **more}, ensure_ascii=False)


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(
    "prompt, text, parts",
    [
        ("<|im_start|>assistant\n", "<think>\nOkay, 2+2.\n</think>\n\nIt is 4.", ("Okay, 2+2.", "It is 4.")),
        ("<|Assistant|><think>\n", "Okay, 2+2.\n</think>\n\nIt is 4.", ("Okay, 2+2.", "It is 4.")),
        ("<think>\n", "Okay, so 2", ("Okay, so 2", "")),  # max_tokens came first
        ("assistant\n", "<think>\nOkay, so 2", ("Okay, so 2", "")),
        ("assistant\n<think>\n\n</think>\n\n", "It is 4.", ("", "It is 4.")),  # enable_thinking: false
        ("assistant\n<think>\n\n</think>\n\n", "It is </think>.", ("", "It is </think>.")),
        ("", "Okay, 2+2.</think>It is 4.", ("Okay, 2+2.", "It is 4.")),  # the prompt was cut
        ("", "<think></think>\n\n<think> is a tag", ("", "<think> is a tag")),
        ("</think>", "It is 4.", ("", "It is 4.")),
    ],
)
def test_reasoning_between_tags(name, prompt, text, parts):
    assert parsed(text, name, prompt=prompt)[:2] == parts


@pytest.mark.parametrize(
    "prompt, text, implied",
    [
        ("assistant\n", "It is 4.", ("It is 4.", "")),
        ("", "The tag <think> begins it, </think> ends it.", ("The tag <think> begins it,", "ends it.")),
        ("Explain <think> to me\n", "It is a tag.", ("It is a tag.", "")),
    ],
)
def test_texts_without_a_begin(prompt, text, implied):
    """DeepSeek-R1 begins with its reasoning; others that write no marker have none."""
    assert parsed(text, "deepseek_r1", prompt=prompt)[:2] == implied
    assert parsed(text, "qwen3", prompt=prompt)[:2] == ("", text)


@pytest.mark.parametrize(
    "name, text, parts",
    [
        ("mistral", "[THINK]Two and two.[/THINK]Four.", ("Two and two.", "Four.")),
        ("mistral", "[THINK]Two and", ("Two and", "")),
        ("mistral", "Four.", ("", "Four.")),
        ("granite", "Here is my thought process:\n2+2\n\nHere is my response:\nFour.", ("2+2", "Four.")),
        ("granite", "Here's my thought process: 2+2 Here's my response: Four.", ("2+2", "Four.")),
        ("granite", "Here is my response: Four.", ("", "Here is my response: Four.")),
    ],
)
def test_reasoning_of_other_families(name, text, parts):
    assert parsed(text, name)[:2] == parts


ANALYSIS = "<|channel|>analysis<|message|>User asks: weather. Use the tool.<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}'
FINAL = "<|start|>assistant<|channel|>final<|message|>It is **sunny**."
THOUGHT = "User asks: weather. Use the tool."
PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    "text, parts",
    [
        (ANALYSIS + FINAL, (THOUGHT, "It is **sunny**.", [])),
        (ANALYSIS + FINAL + "<|return|>", (THOUGHT, "It is **sunny**.", [])),
        (ANALYSIS + CALL, (THOUGHT, "", [PARIS])),
        (ANALYSIS + CALL + "<|call|>", (THOUGHT, "", [PARIS])),
        (ANALYSIS + CALL + "<|call|>" + CALL, (THOUGHT, "", [PARIS, PARIS])),
        (
            ANALYSIS
            + '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Paris"}',
            (THOUGHT, "", [PARIS]),
        ),
        (
            ANALYSIS + "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>" + CALL,
            (THOUGHT, "I look it up.", [PARIS]),
        ),
        (ANALYSIS[:40], (ANALYSIS[30:40], "", [])),
        (FINAL.removeprefix("<|start|>assistant<|channel|>final<|message|>"), ("", "It is **sunny**.", [])),
        (ANALYSIS + CALL[:-3], (THOUGHT, CALL[:-3], [])),  # malformed: kept as it is
    ],
)
def test_channels_of_gpt_oss(text, parts):
    assert parsed(text, "openai_gptoss", "openai") == parts
    assert parsed(text, "openai_gptoss")[0] == parts[0]
    assert parsed(text, NONE, "openai")[2] == parts[2]


@pytest.mark.parametrize(
    "name, text, content, calls",
    [
        ("hermes", f"<tool_call>\n{written(WEATHER)}\n</tool_call>", "", [WEATHER]),
        (
            "hermes",
            f"Let me look.\n<tool_call>\n{written(WEATHER)}\n</tool_call>\n<tool_call>\n{written(TIME)}\n</tool_call>",
            "Let me look.",
            [WEATHER, TIME],
        ),
        ("hermes", f"<tool_call>{written(WEATHER)}", "", [WEATHER]),  # </tool_call> as a stop string
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ("llama3_json", written(WEATHER, "parameters"), "", [WEATHER]),
        ("llama3_json", f"<|python_tag|>{written(WEATHER, 'parameters')}; {written(TIME)}", "", [WEATHER, TIME]),
        ("mistral", f"[TOOL_CALLS][{written(WEATHER)}, {written(TIME)}]", "", [WEATHER, TIME]),
        ("mistral", f"[TOOL_CALLS] [{written(WEATHER, id='VvvODy9mT')}]", "", [WEATHER]),
        ("mistral", f"Look:[TOOL_CALLS]get_weather[ARGS]{json.dumps(WEATHER[1])}", "Look:", [WEATHER]),
        (
            "mistral",
            f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(WEATHER[1])}"
            f"[TOOL_CALLS]get_time{json.dumps(TIME[1])}",
            "",
            [WEATHER, TIME],
        ),
    ],
)
def test_calls_of_tools(name, text, content, calls):
    assert parsed(text, NONE, name) == ("", content, calls)


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 50_000),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("llama3_json", '{"answer": 4}'),
        ("llama3_json", 'Sure: {"name": "f", "parameters": {}}'),
        ("llama3_json", '{"name": "f", "parameters": {}} is the call'),
        ("llama3_json", ""),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 7]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("openai", "<|channel|>commentary to=functions.f<|message|>[1]<|call|>"),
    ],
)
def test_malformed_calls_stay_in_the_content(name, text):
    assert parsed(text, NONE, name) == ("", text, [])


def test_one_malformed_call_beside_a_good_one():
    bad = "<tool_call>{broken</tool_call>"
    assert parsed(f"{bad}<tool_call>{written(WEATHER)}</tool_call>", NONE, "hermes") == ("", bad, [WEATHER])


def test_reasoning_and_a_call():
    text = f"<think>\nI need it: <tool_call>no</tool_call>\n</think>\n\n<tool_call>\n{written(WEATHER)}\n</tool_call>"
    assert parsed(text, "qwen3", "hermes") == ("I need it: <tool_call>no</tool_call>", "", [WEATHER])


def test_ids_depend_on_the_row_alone_and_differ():
    text = f"<tool_call>{written(WEATHER)}</tool_call>" * 2
    parser = OutputParser(NONE, "hermes")
    ids = [[c["id"] for c in parser(text, [], place, str).tool_calls] for place in ("1-0", "1-0", "1-1")]
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4 and all(i.startswith("call_") for i in ids[0])
    turns = [parser(text, prompt, "1-0", str).tool_calls[0]["id"] for prompt in ([5], [5, 6], [5])]
    assert turns[0] == turns[2] != turns[1]
    own = OutputParser(NONE, "mistral")(f"[TOOL_CALLS][{written(WEATHER, id='VvvODy9mT')}]", [], "1-0", str)
    assert own.tool_calls[0]["id"] == "VvvODy9mT"


def test_special_tokens_that_are_no_markers_are_left_out():
    text, special = "<s>[THINK]a[/THINK]b</s>", ["<s>", "</s>", "[THINK]", "[/THINK]", ""]
    assert parsed(text, "mistral", special=special)[:2] == ("a", "b")
    parts = OutputParser("mistral", NONE, special)("[THINK]a[/THINK]b</s>", [], "1-0", str, skip_special_tokens=False)
    assert parts.content == "b</s>"


MARKS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:", "Here is my response:"),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", ";", "\n", " "),
    *("<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.f", "<|message|>"),
    *("<|end|>", "<|call|>", "<|constrain|>", "{", "}", "[", '"name": "f", "arguments": {}', "name", "é😀\x00"),
    *(written(WEATHER), written(TIME, "parameters"), f"[{written(TIME)}]"),
]
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=12).map("".join)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.sampled_from(list(MARKERS)), st.sampled_from([NONE, *EXTRACTS]), st.sampled_from(["", "<think>\n"]))
@example("<|channel|><|message|>", "openai_gptoss", "openai", "")
def test_no_character_is_lost_or_invented(text, reasoning, calls, prompt):
    """Reasoning and content are made of the text's characters, in order; without markers all are there."""
    thought, content, called = parsed(text, reasoning, calls, prompt)
    left = iter(sorted(text))
    if "\n" not in (thought or ""):  # messages of a channel are joined by one
        assert all(character in left for character in sorted(thought + content))
    if not thought and not called and reasoning != "openai_gptoss" and not any(mark in text for mark in MARKS[:6]):
        begins = prompt or reasoning == "deepseek_r1"
        assert content == text or (begins and not text.strip())  # white space alone may be all of the reasoning
    if reasoning != "openai_gptoss":
        assert thought in text and (called or content in text)


def test_long_hostile_texts_take_moments():
    start = time.process_time()
    for text in ('<tool_call>{"a": "' * 4000, "[TOOL_CALLS]" * 20_000, "<|channel|>" * 20_000, "<think>" * 20_000):
        for calls in EXTRACTS:
            for reasoning in MARKERS:
                parsed(text, reasoning, calls)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "template, names",
    [
        ("{{'<|Assistant|><think>\\n'}}", ("qwen3", NONE)),
        ("{{ content.split('</think>')[-1] }} <tool_call>\\n{\"name\": <function-name>", ("qwen3", "hermes")),
        ("<tool_call>\\n<function=example>", (NONE, NONE)),
        ('Respond in the format {"name": function name, "parameters": dictionary', (NONE, "llama3_json")),
        ("[THINK] [TOOL_CALLS]", ("mistral", "mistral")),
        ("<|channel|>analysis<|message|> <|channel|>commentary to=", ("openai_gptoss", "openai")),
        ("", (NONE, NONE)),
    ],
)
def test_auto_asks_the_chat_template(template, names):
    assert chosen_parsers("auto", "auto", template) == names
    assert chosen_parsers(NONE, "hermes", template) == (NONE, "hermes")


def test_all_names_work():
    for reasoning in REASONING_PARSERS:
        for calls in TOOL_CALL_PARSERS:
            assert parsed("Four.", reasoning, calls)[reasoning != "deepseek_r1"] == "Four."
