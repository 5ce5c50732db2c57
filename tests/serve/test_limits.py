"""What a server lets in: requests with the key, of bounded size, as long as the queue has room and it does not end."""

from __future__ import annotations

import json
import threading

from tests.support.served import error_of, served, wait_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


OPEN = ("/health", "/")  # these hold no data


def test_no_route_answers_without_the_key(llm):
    with served(llm, api_keys=("first", "second-ü")) as server:
        paths = server.client.get("/openapi.json", headers={"Authorization": "Bearer first"}).json()["paths"]
        assert {TEXT, CHAT, "/metrics", "/v1/models", "/tokenize", "/version"} <= paths.keys()
        requests = [(method, path) for path, methods in paths.items() for method in methods if path not in OPEN]
        for method, path in [*requests, ("get", "/openapi.json"), ("get", "/docs"), ("put", "/x")]:
            for given in (None, "Bearer", "Bearer fir", "Basic first", "first", b"Bearer second-\xff"):
                headers = {} if given is None else {"Authorization": given}
                error = error_of(server.client.request(method, path, headers=headers), 401)
                assert error["type"] == "authentication_error" and "first" not in error["message"]
        assert server.client.get("/health").status_code == 200
        for key in ("first", "second-ü"):
            headers = {"Authorization": b"Bearer " + key.encode()}
            assert server.client.get("/v1/models", headers=headers).status_code == 200


def test_bodies_that_are_too_large_are_not_read(llm):
    with served(llm, max_body=1000) as server:
        assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200
        large = json.dumps({"prompt": "a" * 1000}).encode()
        assert "at most 1000 bytes" in error_of(server.client.post(TEXT, content=large), 413)["message"]
        sent = 0

        def endless():
            nonlocal sent
            while sent < 1 << 30:
                sent += 1 << 16
                yield b" " * (1 << 16)

        error_of(server.client.post("/tokenize", content=endless()), 413)
        assert sent < 1 << 27


def test_a_full_queue_and_a_server_that_ends(llm):
    with served(llm, max_waiting=2) as server:
        long = {"prompt": [5], "max_tokens": 200, "ignore_eos": True}
        answers: list = []
        waiting = [threading.Thread(target=lambda: answers.append(server.post(TEXT, **long))) for _ in range(20)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        statuses = {answer.status_code for answer in answers}
        assert statuses <= {200, 429} and 200 in statuses
        refused = [answer for answer in answers if answer.status_code == 429]
        for answer in refused:
            assert error_of(answer, 429)["code"] == "queue_full" and int(answer.headers["Retry-After"]) >= 1
        flooded = server.post(TEXT, prompt=[[5]] * 100, max_tokens=5)
        assert error_of(flooded, 429)["type"] == "rate_limit_error"
        wait_for(server.idle)
        server.desk.drain()
        assert error_of(server.post(CHAT, messages=HELLO), 503)["type"] == "server_error"
        error_of(server.client.get("/health"), 503)


def test_an_engine_that_fails_ends_requests_with_its_error(llm, monkeypatch):
    with served(llm) as server:
        monkeypatch.setattr(server.desk, "record", lambda _: 1 / 0)
        with server.client.stream("POST", TEXT, json={"prompt": "a", "stream": True, "max_tokens": 9}) as response:
            *events, done = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert response.status_code == 200 and done == "[DONE]"
        assert "the engine has failed: ZeroDivisionError" in json.loads(events[-1])["error"]["message"]
        assert server.post(TEXT, prompt="a").status_code == 503
        wait_for(lambda: server.error)  # rows end a moment before the engine's thread does
        assert isinstance(server.error, ZeroDivisionError)
    with served(llm) as server:
        monkeypatch.setattr(server.desk, "record", lambda _: 1 / 0)
        assert "the engine has failed" in error_of(server.post(TEXT, prompt="a"), 500)["message"]
