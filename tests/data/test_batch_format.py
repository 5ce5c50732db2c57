"""Fields of rows: honoured, harmless, refused by name, or told once as unknown. None is ignored without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdecode.data.prompts.batch_format import model_names
from hpcdecode.data.prompts.messages import ChatOptions
from hpcdecode.data.prompts.rows import Row, RowError, read_rows
from hpcdecode.requests.params import SamplingParams

CHAT = [{"role": "user", "content": "hi"}]
MODEL = "/models/Llama-3.1-8B"


def read(tmp_path, *lines, **options):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(read_rows([str(path)], SamplingParams(), model=MODEL, **options))


def request(body, url="/v1/chat/completions"):
    return {"custom_id": "c", "method": "POST", "url": url, "body": body}


def chat_request(**fields):
    return request({"messages": CHAT, **fields})


@pytest.mark.parametrize("wrap", [lambda fields: fields, request], ids=["plain", "body"])
def test_fields_of_chats_are_honoured(tmp_path, wrap):
    variables = {"enable_thinking": False, "level": [1]}
    rows = read(
        tmp_path,
        wrap({"messages": CHAT}),
        wrap({"messages": CHAT, "chat_template_kwargs": variables, "add_generation_prompt": None}),
        wrap({"messages": CHAT, "add_generation_prompt": False, "continue_final_message": True}),
    )
    assert [r.chat for r in rows] == [ChatOptions(), ChatOptions(variables=variables), ChatOptions(False, True)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"continue_final_message": True}, 'got true (the default); add "add_generation_prompt": false'),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "false beside continue_final_message, got true;",
        ),
        ({"continue_final_message": 1}, "continue_final_message: expected true or false, got an integer 1"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt: expected true or false, got a string"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected an object, got a list"),
        ({"chat_template_kwargs": {"tools": []}}, "expected names of the template's own, got 'tools'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: expected an object with type function and function.name"),
        ({"chat_template": "{{ messages }}"}, "chat_template: not supported yet"),
        ({"tool_choice": "required"}, "tool_choice: expected auto or none, the only ones supported"),
    ],
)
def test_what_chats_may_not_ask(tmp_path, fields, reason):
    for error in read(tmp_path, {"messages": CHAT, **fields}, chat_request(**fields)):
        assert isinstance(error, RowError) and reason in error.reason


def test_fields_of_chats_need_messages(tmp_path):
    neutral, error = read(
        tmp_path, {"prompt": "a", "add_generation_prompt": True}, {"prompt": "a", "chat_template_kwargs": {"x": 1}}
    )
    assert neutral.chat == ChatOptions()
    assert error.reason == "chat_template_kwargs: expected beside messages, got a row without them"


HARMLESS = {
    **{"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s"},
    **{"prompt_cache_key": "k", "prediction": {"type": "content"}, "parallel_tool_calls": True, "priority": 3},
}
NEUTRAL = {
    **{"stream": False, "modalities": ["text"], "functions": [], "function_call": "none", "tools": [], "echo": False},
    **{"tool_choice": "none", "suffix": None, "best_of": 1, "audio": None, "verbosity": "medium", "new_field": False},
}


def test_fields_of_requests_that_change_nothing_are_accepted_in_peace(tmp_path, caplog):
    row, other = read(
        tmp_path,
        chat_request(**HARMLESS, **NEUTRAL),
        {**request({"prompt": "a", "add_special_tokens": True, "suffix": ""}, "/v1/completions"), "custom_id": "d"},
    )
    assert isinstance(row, Row) and row.params == SamplingParams() and isinstance(other, Row)
    assert not caplog.messages


@pytest.mark.parametrize(
    "field",
    [
        *(
            {"stream": True},
            {"modalities": ["text", "audio"]},
            {"functions": [{"name": "f"}]},
            {"function_call": "auto"},
        ),
        *(
            {"echo": True},
            {"suffix": "x"},
            {"audio": {"voice": "a"}},
            {"reasoning_effort": "high"},
            {"verbosity": "low"},
        ),
        *({"web_search_options": {}}, {"add_special_tokens": True}, {"max_token": 5}, {"documents": [{}]}, {"new": 0}),
    ],
)
def test_fields_of_requests_that_would_change_the_text_are_refused_by_name(tmp_path, field):
    (error,) = read(tmp_path, chat_request(**field))
    assert error.reason.startswith(f"{next(iter(field))}: expected fields of a request that are supported")


def test_a_refused_field_is_told_with_the_known_one_or_another_way(tmp_path):
    near, effort = read(tmp_path, chat_request(max_token=5), chat_request(reasoning_effort="low"))
    assert near.reason.endswith("; did you mean 'max_tokens'?")
    assert effort.reason.endswith("if the model's chat template reads it, give it in chat_template_kwargs")


@pytest.mark.parametrize("name", [None, MODEL, "Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "meta-llama/llama-3.1-8b/"])
def test_a_request_names_the_jobs_model(tmp_path, name):
    (row,) = read(tmp_path, chat_request(model=name))
    assert isinstance(row, Row)


@pytest.mark.parametrize("name", ["gpt-4o-mini", "Llama-3.1-8B-Instruct", "", "demo", 5])
def test_a_request_for_another_model_is_refused(tmp_path, name):
    (error,) = read(tmp_path, chat_request(model=name))
    assert error.reason.startswith("model: expected ")
    if isinstance(name, str):
        assert f'Llama-3.1-8B (the job\'s model, on the hub or as a directory), got "{name}"; change' in error.reason


def test_names_of_a_model(tmp_path):
    demo = Path(__file__).parents[2] / "jobs" / "demo" / "model"
    assert "demo" in model_names(str(demo))
    snapshot = tmp_path / "models--org--Name-7B" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    assert model_names(str(snapshot) + "/") == {"0123abcd", "Name-7B"}
    assert model_names(str(tmp_path / "link")) == {"link", "0123abcd", "Name-7B"}


def test_unknown_fields_of_plain_rows_are_told_once(tmp_path, caplog):
    rows = [{"prompt": "a", "meta": n, "model": "m", "max_token": 5} for n in range(3)]
    rows += [{"prompt": "a", "temprature": 1, "top-p": 0.5, "MAX_TOKENS": 4, "a\nb\x1b": 1}]
    assert all(isinstance(row, Row) for row in read(tmp_path, {"prompt": "a", "id": 1, "n": 2}, *rows))
    told = sorted(caplog.messages)
    assert told == sorted(
        f"hpcdecode: warning: line {line}: field {name} is not known and ignored{hint}"
        for line, name, hint in [
            (2, "'meta'", ""),
            (2, "'model'", ""),
            (2, "'max_token'", "; did you mean 'max_tokens'?"),
            (5, "'temprature'", "; did you mean 'temperature'?"),
            (5, "'top-p'", "; did you mean 'top_p'?"),
            (5, "'MAX_TOKENS'", "; did you mean 'max_tokens'?"),
            (5, r"'a\nb\x1b'", ""),
        ]
    )


def test_unknown_fields_beside_a_requests_body_and_in_a_bad_row_are_told(tmp_path, caplog):
    request_row, bad = read(tmp_path, {**chat_request(), "bodyx": 1}, {"promt": "a"})
    assert isinstance(request_row, Row) and isinstance(bad, RowError)
    first, second = caplog.messages
    assert "line 1: field 'bodyx' is not known" in first and "did you mean 'prompt'?" in second


def test_warnings_are_bounded(tmp_path, caplog):
    read(tmp_path, *({"prompt": "a", f"own{n}": 1} for n in range(100)))
    told = caplog.messages
    assert len(told) == 21
    assert told[-1] == "hpcdecode: warning: line 21: more fields are not known; they are ignored without a warning"


def test_the_prompts_own_column_is_known(tmp_path, caplog):
    (row,) = read(tmp_path, {"question": "a"}, column="question")
    assert row.prompt == "a" and not caplog.messages
