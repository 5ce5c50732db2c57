"""Requests that are not answered as they ask: errors in the form of the OpenAI API, keys, sizes, full queues."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.served import error_of, wait_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
REFUSED = [
    (TEXT, {}, "body: expected prompt"),
    (TEXT, {"prompt": ""}, "prompt: expected a string that is not empty"),
    (TEXT, {"prompt": []}, "prompt: expected a string, token ids"),
    (TEXT, {"prompt": [[]]}, "prompt_token_ids: expected at least one element"),
    (TEXT, {"prompt": ["a", 5]}, "prompt: expected strings or lists of token ids, got an integer 5 at index 1"),
    (TEXT, {"prompt": {"a": 1}}, "prompt: expected a string, got an object"),
    (TEXT, {"prompt": [1 << 40]}, "prompt_token_ids: expected integers"),
    (TEXT, {"prompt": [600]}, "expected token ids in [0, 512), got 600"),
    (TEXT, {"prompt": [5] * 2000}, "prompt too long"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens: expected an integer >= 1, or 0 beside echo"),
    (TEXT, {"prompt": "a", "max_tokens": 0, "echo": True, "n": 2}, "n: expected 1 beside max_tokens 0"),
    (
        TEXT,
        {"prompt": "a", "max_tokens": 0, "echo": True, "prompt_logprobs": 1, "stream": False},
        "prompt_logprobs: expected none beside max_tokens 0",
    ),
    (TEXT, {"prompt": "a", "max_tokens": 0, "echo": True, "tmperature": 2}, "tmperature: expected fields"),
    (TEXT, {"prompt": "a", "temperaturex": 1}, "did you mean 'temperature'"),
    (TEXT, {"prompt": "a", "temperature": -1}, "temperature: expected a finite number >= 0"),
    (TEXT, {"prompt": "a", "temperature": "1"}, "temperature: expected a number"),
    (TEXT, {"prompt": "a", "n": 5000}, "n: expected at most 2048 choices"),
    (TEXT, {"prompt": ["a"] * 1500, "n": 2}, "n: expected at most 2048 choices"),
    (TEXT, {"prompt": "a", "seed": -1}, "seed: expected an integer in"),
    (TEXT, {"prompt": "a", "logprobs": True}, "logprobs: expected an integer, got true"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs: expected an integer in [0, 20]"),
    (TEXT, {"prompt": "a", "stream": "yes"}, "stream: expected true or false"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options: expected beside stream true"),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"include_usag": True}}, "did you mean 'include_usage'"),
    (TEXT, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs: expected without stream"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix: expected fields"),
    (TEXT, {"prompt": "a", "best_of": 3}, "best_of: not supported yet"),
    (TEXT, {"prompt": "a", "model": 5}, "model: expected a string"),
    (TEXT, {"prompt": "a\ud800"}, "body: expected JSON"),
    (TEXT, {"prompt": "a", "stop": [""]}, "stop: expected strings that are not empty"),
    (CHAT, {"messages": []}, "messages: expected at least one element"),
    (CHAT, {"messages": HELLO, "prompt": "a"}, "expected exactly one of"),
    (CHAT, {"messages": HELLO, "echo": True}, "echo: expected fields"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, "tools[0]: expected an object with type function"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice: expected auto or none"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format: expected an object"),
    ("/tokenize", {"prompt": 5}, "prompt: expected a string"),
    ("/tokenize", {"prompt": "a", "messagesx": []}, "did you mean 'messages'"),
    ("/tokenize", {}, "expected exactly one of"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens: expected true or false"),
    ("/detokenize", {"tokens": "a"}, "tokens: expected a list of token ids"),
    ("/detokenize", {"tokens": [-1]}, "tokens: expected integers"),
    ("/detokenize", {"tokens": [600]}, "expected token ids in [0, 512)"),
    ("/detokenize", {}, "tokens: expected a list"),
]


def post(server, path, body):
    content = json.dumps(body)  # with lone surrogates as escapes
    return server.client.post(path, content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_a_request_that_cannot_be_used_is_refused(server, path, body, message):
    for streams in ({}, {"stream": True}) if path in (TEXT, CHAT) and "stream" not in str(body) else ({},):
        error = error_of(post(server, path, body | streams), 400)
        assert message in error["message"] and error["type"] == "invalid_request_error"
    assert server.idle()


def test_one_unusable_prompt_takes_all_rows_of_the_request_back(server):
    body = {"prompt": [[5], [6], [600]], "max_tokens": 500, "ignore_eos": True}
    assert "got 600" in error_of(post(server, TEXT, body), 400)["message"]
    wait_for(server.idle)


def test_models_and_paths_that_there_are_not(server):
    for response in (
        post(server, TEXT, {"prompt": "a", "model": "other"}),
        post(server, "/tokenize", {"prompt": "a", "model": "other"}),
        server.client.get("/v1/models/other"),
    ):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model") and "expected tiny" in error["message"]
    error_of(server.client.get("/v1/nothing"), 404)
    error_of(server.client.get(TEXT), 405)
    assert server.client.get("/v1/models/tiny").json()["id"] == "tiny"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"a"', b"\xff", b"[" * 100_000, b'{"prompt": NaN}', b"1e999"])
def test_bodies_that_are_no_json_objects(server, content):
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        assert error_of(server.client.post(path, content=content), 400)["code"] == "invalid_json"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def schemas(server):
    """The published schema of each path's body."""
    paths = server.client.get("/openapi.json").json()["paths"]
    bodies = {path: paths[path]["post"]["requestBody"]["content"] for path in (TEXT, CHAT, "/tokenize", "/detokenize")}
    return {path: of["application/json"]["schema"] for path, of in bodies.items()}


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_json_makes_the_server_fail(server, schemas, data):
    path = data.draw(st.sampled_from([TEXT, CHAT, "/tokenize", "/detokenize"]))
    schema = schemas[path]
    names = sorted((schema if "properties" in schema else schema["anyOf"][data.draw(st.integers(0, 1))])["properties"])
    usable = {"prompt": "a b", "messages": HELLO, "tokens": [5], "max_tokens": 3, "stream": True, "n": 2}
    body = {name: usable[name] for name in names if name in usable and data.draw(st.booleans())}
    body |= {"max_tokens": 3} if "max_tokens" in names else {}
    body |= data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=2))
    response = server.client.post(path, content=json.dumps(body).encode())
    assert response.status_code < 500, (path, body, response.text)
    assert response.status_code == 200 or response.json()["error"]["message"]
