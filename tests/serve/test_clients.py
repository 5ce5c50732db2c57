"""Clients that go, clients that do not read, and the client of OpenAI."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import openai
import pytest

from tests.support.served import wait_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG = {"prompt": [5], "max_tokens": 1000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_a_client_that_goes_are_cancelled(server, stream):
    cancelled = finished(server, "abort")
    with httpx.Client(base_url=server.url) as client:
        if stream:
            with client.stream("POST", TEXT, json={**LONG, "n": 2, "stream": True}) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(TEXT, json={**LONG, "prompt": [[5], [6]]}, timeout=0.3)
    wait_for(server.idle, 3)  # the rows take longer
    wait_for(lambda: finished(server, "abort") == cancelled + (1 if stream else 2), 3)


def finished(server, reason):
    lines = server.client.get("/metrics").text.splitlines()
    name = f'hpcdecode:request_success_total{{finished_reason="{reason}",model_name="tiny",source="request"}} '
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


def test_a_client_that_goes_before_its_row_is_queued(server, monkeypatch):
    submit, entered, go = server.desk.submit, threading.Event(), threading.Event()

    def late(*arguments, **options):
        entered.set()
        assert go.wait(30)
        return submit(*arguments, **options)

    monkeypatch.setattr(server.desk, "submit", late)
    with httpx.Client(base_url=server.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post(TEXT, json=LONG, timeout=0.3)
    assert entered.is_set()
    go.set()
    wait_for(server.idle, 3)


@pytest.mark.parametrize("path", [TEXT, "/tokenize", "/v1/files"])
def test_a_client_that_goes_while_it_sends_is_no_fault_of_the_server(server, caplog, path):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=X\r\nContent-Length: 500"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as leaving:
        leaving.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert leaving.recv(100).startswith(b"HTTP/1.1 100 ")  # the body is waited for
        leaving.sendall(b"--X\r\n")
    for _ in range(3):
        assert server.client.get("/health").status_code == 200
    assert not caplog.records


def test_a_client_that_reads_nothing_holds_nobody_up_and_is_given_up(server, monkeypatch):
    monkeypatch.setattr(server.context, "stall_seconds", 1.0)
    cancelled = finished(server, "abort")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    deaf.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    body = json.dumps({**LONG, "logprobs": 20, "n": 8, "stream": True}).encode()  # megabytes
    deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    wait_for(lambda: server.desk.running)
    for _ in range(3):
        assert server.post(TEXT, prompt="a", max_tokens=5).status_code == 200
    wait_for(server.idle, 30)
    wait_for(lambda: finished(server, "abort") + finished(server, "length") > cancelled, 3)
    deaf.close()


def test_small_answers_do_not_wait_for_acknowledgements(server):
    """Without TCP_NODELAY each of these takes 40 ms."""
    begun = time.monotonic()
    for _ in range(50):
        assert server.client.get("/version").status_code == 200
    assert time.monotonic() - begun < 1


def test_metrics_tell_rows_tokens_and_times(server):
    server.post(CHAT, messages=HELLO, max_tokens=6, stream=True, ignore_eos=True)
    text = server.client.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    label, row = '{model_name="tiny"}', '{model_name="tiny",source="request"}'
    assert values[f"hpcdecode:num_requests_running{label}"] == values[f"hpcdecode:num_requests_waiting{label}"] == 0
    assert values[f"hpcdecode:kv_cache_capacity_tokens{label}"] == server.context.kv_capacity
    before = values
    server.post(CHAT, messages=HELLO, max_tokens=6, stream=True, ignore_eos=True)
    text = server.client.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    grown = {name: value - before[name] for name, value in values.items() if value != before[name]}
    assert grown['hpcdecode:operation_seconds_total{model_name="tiny",operation="attend"}'] > 0
    assert grown[f"hpcdecode:prompt_tokens_total{label}"] == 16
    assert grown[f"hpcdecode:generation_tokens_total{label}"] == 6
    assert grown['hpcdecode:request_success_total{finished_reason="length",model_name="tiny",source="request"}'] == 1
    for name, count in (("time_to_first_token", 1), ("inter_token_latency", 5), ("e2e_request_latency", 1)):
        assert grown[f"hpcdecode:{name}_seconds_count{row}"] == count


def counters(server, *names):
    lines = dict(line.rsplit(" ", 1) for line in server.client.get("/metrics").text.splitlines() if line[0] != "#")
    return [float(lines[f'hpcdecode:{name}_total{{model_name="tiny"}}']) for name in names]


def test_tokens_that_other_rows_had_are_told(server):
    """Of 300 tokens four blocks of 64: the second row makes a prefix of them, which the third one finds."""
    names = "prefix_cache_queries", "prefix_cache_hits"
    before = counters(server, *names)
    asked = [[*range(20, 320), 5 + i] for i in range(3)]
    cached = []
    for ids in asked:
        usage = server.post(TEXT, prompt=ids, max_tokens=2, ignore_eos=True).json()["usage"]
        assert usage["prompt_tokens"] == 301
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 256]
    assert [b - a for a, b in zip(before, counters(server, *names), strict=True)] == [903, 256]
    stream = server.post(TEXT, prompt=asked[0], max_tokens=2, stream=True, stream_options={"include_usage": True})
    last = json.loads(stream.text.split("data: ")[-2])
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}
    assert server.client.get("/stats").json()["tokens"]["cached"] >= 512


def test_tokens_and_texts(server, llm):
    tokenizer = llm.get_tokenizer()
    body = server.post("/tokenize", prompt="def f", return_token_strs=True).json()
    ids = tokenizer("def f")["input_ids"]
    assert body == {
        "count": len(ids),
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids),
        "max_model_len": 1024,
    }
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": "def f"}
    chat = server.post("/tokenize", messages=HELLO).json()
    assert chat["tokens"] == tokenizer("<s>user: hello\nassistant:", add_special_tokens=False)["input_ids"]
    assert server.post("/tokenize", prompt="").json()["tokens"] == []
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_the_client_of_openai(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        (model,) = client.models.list()
        chat = {"model": model.id, "messages": HELLO, "max_tokens": 20, "temperature": 1.0, "seed": 5}
        whole = client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=2)
        texts, usage = ["", ""], None
        for chunk in client.chat.completions.create(**chat, n=2, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage
        assert texts == [choice.message.content for choice in whole.choices] and usage == whole.usage
        assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0
        text = {"model": model.id, "prompt": ["a", "b"], "max_tokens": 8, "echo": True, "logprobs": 1}
        whole = client.completions.create(**text)
        assert [choice.text[0] for choice in whole.choices] == ["a", "b"]
        with pytest.raises(openai.NotFoundError, match="expected tiny"):
            client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError, match="temperature: expected"):
            client.completions.create(**text, temperature=-1)


def test_the_client_of_openai_without_threads(server):
    async def ask(client, number):
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 10, "temperature": 1.0, "seed": number}
        stream = await client.chat.completions.create(**body, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await client.chat.completions.create(**body)
        assert whole.choices[0].message.content == text
        return text

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    assert len(set(asyncio.run(main()))) > 6
