"""Reasoning, content and calls of tools over HTTP, at once and streamed."""

from __future__ import annotations

import json
import shutil

import openai
import pytest

from hpcdecode import LLM
from tests.support.served import chunks, joined, served

CALL = '<tool_call>{"name": "get", "arguments": {"x": 1}}</tool_call>'
WRITTEN = {  # what a grammar makes the model write
    "all": ("<think>[a-z]{3,8}</think>Yes " + CALL + CALL, "tool_calls"),
    "reasoning": ("<think>Hm, [a-z]{3}\\.\n</think>\n\nThe answer is [0-9]{2}\\.", "stop"),
    "empty": ("<think>\n\n</think>\n\nHello", "stop"),
    "content": ("Hello [a-z]{3}", "stop"),
}
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 120}


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """A server of a model whose chat template reads tools."""
    model = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(checkpoint("llama3"), model)
    template = model / "chat_template.jinja"
    template.write_text("{{ tools | tojson if tools else '' }}" + template.read_text())
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    llm = LLM(model, dtype="float32", batch=8, kv_memory="16M", threads=1, **parsers)
    with served(llm) as running:
        yield running


def body_of(name):
    escaped = WRITTEN[name][0].replace(CALL, CALL.replace("{", "\\{").replace("}", "\\}"))
    return {**ASK, "structured_outputs": {"regex": escaped}}


@pytest.mark.parametrize("name", WRITTEN)
def test_parts_at_once_and_streamed(server, name):
    answer = server.post("/v1/chat/completions", **body_of(name)).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == WRITTEN[name][1]
    assert ("reasoning_content" in message) == (name in ("all", "reasoning"))
    assert message.get("reasoning") == message.get("reasoning_content")
    assert "<" not in message["content"] and message["content"] == message["content"].strip()
    if name == "all":
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"x": 1}] * 2
        assert message["content"] == "Yes"
    stream = server.post("/v1/chat/completions", **body_of(name), stream=True)
    (whole,) = joined(stream)
    for index, call in enumerate(whole["message"].get("tool_calls", [])):
        assert call.pop("index") == index
    assert whole == choice
    told = sum(bool(chunk["choices"][0]["delta"]) for chunk in chunks(stream))
    assert told > (2 if name in ("all", "reasoning") else 1)  # a chunk may have what several tokens say


def test_tools_by_the_client_of_openai(server):
    function = {"name": "get", "description": "Get.", "parameters": {"type": "object", "properties": {}}}
    body = body_of("all")
    options = {"extra_body": {"structured_outputs": body.pop("structured_outputs")}}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        client.chat.completions.stream(
            model="tiny", tools=[{"type": "function", "function": function}], **body, **options
        ) as stream,
    ):
        for _ in stream:
            pass
        found = stream.get_final_completion().choices[0]
    assert [call.function.name for call in found.message.tool_calls] == ["get", "get"]
    assert found.message.content == "Yes" and found.finish_reason == "tool_calls"
