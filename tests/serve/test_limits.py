"""What a server lets in: requests with the key, of bounded size, as long as the queue has room and it does not end."""

from __future__ import annotations

import base64
import json
import threading

from tests.support.served import error_of, served, wait_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


KEYS = ("first", "second-ü")
WRONG = (None, "Bearer", "Bearer fir", "Basic first", "Basic %%%", b"Basic \xe9", "first", b"Bearer second-\xff")


def basic(key: str, user: str = "") -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{key}'.encode()).decode()}"}


def test_no_route_answers_without_the_key(llm):
    with served(llm, api_keys=KEYS) as server:
        paths = server.client.get("/openapi.json", headers={"Authorization": "Bearer first"}).json()["paths"]
        assert {TEXT, CHAT, "/metrics", "/v1/models", "/tokenize", "/version", "/health"} <= paths.keys()
        requests = [(method, path) for path, methods in paths.items() for method in methods]
        wrong = [{} if given is None else {"Authorization": given} for given in WRONG]
        wrong += [basic(""), basic("fir"), basic("x", "first")]
        for method, path in [*requests, ("get", "/"), ("get", "/openapi.json"), ("get", "/docs"), ("put", "/x")]:
            for headers in wrong:
                answer = server.client.request(method, path, headers=headers)
                error = error_of(answer, 401)
                assert error["type"] == "authentication_error" and "first" not in error["message"]
                challenges = answer.headers.get_list("www-authenticate")
                assert challenges == ["Bearer", 'Basic realm="hpcdecode", charset="UTF-8"']
        for key in KEYS:
            for headers in ({"Authorization": b"Bearer " + key.encode()}, basic(key), basic(key, "me")):
                for path in ("/v1/models", "/health", "/"):
                    assert server.client.get(path, headers=headers).status_code == 200


def test_a_password_that_a_browser_keeps_serves_no_page_of_another_site(llm):
    with served(llm, api_keys=KEYS) as server:
        body, own = {"prompt": "a", "max_tokens": 1}, server.url
        for origin, status in (
            ({"Origin": own}, 200),
            ({"Origin": "https://example.org"}, 403),
            ({"Origin": "null"}, 403),
        ):
            assert server.client.post(TEXT, json=body, headers=basic("first") | origin).status_code == status
        for site, status in (("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)):
            headers = basic("first") | {"Sec-Fetch-Site": site, "Origin": own}
            assert server.client.post(TEXT, json=body, headers=headers).status_code == status
            assert server.client.get("/v1/models", headers=headers).status_code == 200  # the other page cannot read it
        headers = {"Authorization": "Bearer first", "Origin": "https://example.org"}  # which no browser adds by itself
        assert server.client.post(TEXT, json=body, headers=headers).status_code == 200
        answer = server.client.delete("/v1/files/x", headers=basic("first") | {"Sec-Fetch-Site": "cross-site"})
        assert error_of(answer, 403)["code"] == "cross_site_request"


def test_clients_are_told_apart_by_key_or_else_by_address(llm, monkeypatch):
    given = []
    for keys in (KEYS, ()):
        with served(llm, api_keys=keys) as server:
            put = server.desk._queue.put
            monkeypatch.setattr(
                server.desk._queue, "put", lambda p, client, put=put: (given.append(client), put(p, client))
            )
            for headers in ({"Authorization": "Bearer first"}, basic("first"), basic(KEYS[1])):
                server.client.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers=headers)
    first, same, second, *addresses = given
    assert first == same != second and "first" not in first and addresses == ["127.0.0.1"] * 3


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
