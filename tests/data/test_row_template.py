"""Prompts made of a row's columns by templates, a system prompt and `--chat`."""

from __future__ import annotations

import pytest

from hpcdecode.data.prompts.row_template import PromptOptions, RowTemplate
from hpcdecode.errors import RowProblem, UserError

ROW = {"id": 7, "question": "Why?", "choices": ["a", "b"], "a b": 3, "prompt": "old", "max_tokens": 5}


def made(row=ROW, **options):
    return RowTemplate(PromptOptions(**options)).fields(row)


def test_a_prompt_is_made_of_columns_and_replaces_the_rows_own():
    template = 'Q: {{ question }}\n{% for c in choices %}{{ loop.index }}. {{ c }}\n{% endfor %}A ({{ row["a b"] }}):'
    fields = made(prompt_template=template)
    assert fields == {**ROW, "prompt": "Q: Why?\n1. a\n2. b\nA (3):"}
    assert made(prompt_template="{{ prompt }}!")["prompt"] == "old!"
    token_ids = {"prompt_token_ids": [1, 2], "x": "y"}
    assert made(token_ids, prompt_template="{{ x }}") == {"x": "y", "prompt": "y"}


def test_messages_are_made_of_columns():
    template = '[{"role": "user", "content": {{ question | tojson }}}]'
    fields = made({**ROW, "question": 'a "quoted"\nword'}, messages_template=template)
    assert fields["messages"] == [{"role": "user", "content": 'a "quoted"\nword'}] and "prompt" not in fields


def test_a_system_prompt_makes_a_chat_of_a_text():
    user = {"role": "user", "content": "old"}
    assert made(chat=True)["messages"] == [user]
    assert made(system_prompt="Be brief.")["messages"] == [{"role": "system", "content": "Be brief."}, user]
    assert made(system_prompt="S", prompt_template="{{ question }}")["messages"][1]["content"] == "Why?"
    answered = {"messages": [user, {"role": "assistant", "content": "x"}]}
    assert made(answered, chat=True) == answered
    assert [m["role"] for m in made(answered, system_prompt="S")["messages"]] == ["system", "user", "assistant"]


WRONG = {
    "a missing column": (
        ROW,
        {"prompt_template": "{{ answer }}"},
        "'answer' is undefined; the row has 'id', 'question'",
    ),
    "no JSON": (ROW, {"messages_template": "{{ question }}"}, "expected a JSON list of messages, got invalid JSON"),
    "no list": (ROW, {"messages_template": '{"role": "user"}'}, "expected a JSON list of messages, got an object"),
    "out of the sandbox": (ROW, {"prompt_template": "{{ question.__class__.__mro__ }}"}, "unsafe"),
    "a fault of its own": (ROW, {"prompt_template": "{{ 1 // 0 }}"}, "--prompt-template: .*zero"),
    "token ids": ({"prompt_token_ids": [1]}, {"system_prompt": "S"}, "expected a row with a prompt or messages"),
    "two system prompts": (
        {"messages": [{"role": "system", "content": "x"}]},
        {"system_prompt": "S"},
        "expected messages without one of the role system, got one",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_a_template_does_not_fit(name):
    row, options, reason = WRONG[name]
    with pytest.raises(RowProblem, match=reason):
        made(row, **options)


def test_what_templates_read_is_known():
    def columns(**options):
        return RowTemplate(PromptOptions(**options)).columns

    assert columns() == frozenset() and columns(system_prompt="S") == frozenset()
    assert columns(prompt_template="{{ a }}{% for b in c %}{{ b.d }}{% endfor %}") == {"a", "c"}
    assert columns(prompt_template="{{ row['a'] }}") is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt_template": "{{ a "}, "--prompt-template: expected a template in jinja2's language, got .* in line 1"),
        ({"messages_template": "{% if %}"}, "--messages-template: expected a template in jinja2's language"),
    ],
)
def test_a_template_that_is_none(options, reason):
    with pytest.raises(UserError, match=reason):
        RowTemplate(PromptOptions(**options))
