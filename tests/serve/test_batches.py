"""Batches over a live desk: answers, bad rows, cancelling, expiry, going on after a restart, clients apart."""

from __future__ import annotations

import json
import time

import pytest

from hpcdecode import LLM
from hpcdecode.config import Job
from hpcdecode.data.results.export import export
from hpcdecode.data.results.read import Results
from hpcdecode.generate import generate
from hpcdecode.requests.params import SamplingParams
from tests.support.batch_servers import URL, BatchServer, lines_of, request

ROWS = [request(i) for i in range(60)]
LONG = {"max_tokens": 900, "ignore_eos": True, "n": 1, "temperature": 0}
OPTIONS = dict(dtype="float32", batch=8, kv_memory=16 << 20)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint("llama3"), threads=1, **{**OPTIONS, "kv_memory": "16M"})


def exported(tmp_path, checkpoint, data: bytes, kind="completions", **options) -> bytes:
    """What `hpcdecode generate` and `export --to openai-batch` make of a file."""
    (tmp_path / "in.jsonl").write_bytes(data)
    files = {"prompts": (str(tmp_path / "in.jsonl"),), "output": str(tmp_path / "out.h5")}
    generate(Job(model=str(checkpoint("llama3")), params=SamplingParams(), **files, **OPTIONS, **options))
    export(str(tmp_path / "out.h5"), str(tmp_path / "out.jsonl"), "openai-batch", endpoint=kind)
    return (tmp_path / "out.jsonl").read_bytes()


def untimed(content: bytes) -> list[dict]:
    """Answers without the time they were made at, and the model's name."""
    found = [json.loads(line) for line in content.splitlines()]
    for answer in found:
        if answer["response"]:
            answer["response"]["body"] |= {"created": 0, "model": ""}
    return found


def test_answers_are_those_of_generate_and_export(llm, tmp_path, checkpoint):
    bad = [{"custom_id": "bad", "method": "POST", "url": URL, "body": {"prompt": "x", "max_tokens": 0}}]
    long = [request(99, prompt="word " * 2000)]  # that no context has room for
    data = lines_of([*ROWS[:20], *bad, *ROWS[20:], *long]) + b"\n[1]\n" + lines_of([request(7, n=2)])
    with BatchServer(llm, tmp_path / "data", most_rows=7) as server:
        batch = server.create(data, metadata={"a": "b"})
        assert batch["object"] == "batch" and batch["status"] in ("validating", "in_progress")
        done = server.until(batch)
        both = [server.content(done[name]) for name in ("output_file_id", "error_file_id")]
        described = server.client.get(f"/v1/files/{done['output_file_id']}").json()
        assert server.idle() and not server.context.batches.desk.rows
    assert done["status"] == "completed" and done["errors"] is None and done["metadata"] == {"a": "b"}
    assert done["request_counts"] == {"total": 64, "completed": 61, "failed": 3}
    assert done["created_at"] <= done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]
    assert described["purpose"] == "batch_output" and described["bytes"] == len(both[0])
    expected = untimed(exported(tmp_path, checkpoint, data))
    assert untimed(both[0]) == [answer for answer in expected if answer["error"] is None]
    assert untimed(both[1]) == [answer for answer in expected if answer["error"]]
    assert not list((tmp_path / "data/batches").glob("*.h5*"))


def test_chats(llm, tmp_path, checkpoint):
    chat = "/v1/chat/completions"
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    rows = [{"custom_id": str(i), "method": "POST", "url": chat, "body": {**asked, "seed": i}} for i in range(5)]
    data = lines_of(rows)
    with BatchServer(llm, tmp_path / "data") as server:
        done = server.until(server.create(data + lines_of([ROWS[0]]), chat))
        content, errors = server.content(done["output_file_id"]), untimed(server.content(done["error_file_id"]))
    assert untimed(content) == untimed(exported(tmp_path, checkpoint, data, "chat"))
    assert [e["custom_id"] for e in errors] == ["r-0"] and "the endpoint of the batch" in errors[0]["error"]["message"]


def test_ids_of_calls_are_those_of_generate(tmp_path, checkpoint):
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 250, "n": 2, "seed": 3, "temperature": 1}
    body = chat | {"structured_outputs": {"choice": [call * 2]}}
    url = "/v1/chat/completions"
    data = lines_of({"custom_id": str(i), "method": "POST", "url": url, "body": body} for i in range(3))
    parsers = {"tool_call_parser": "hermes"}
    llm = LLM(checkpoint("llama3"), threads=1, **{**OPTIONS, "kv_memory": "16M"}, **parsers)
    with BatchServer(llm, tmp_path / "data") as server:
        server.post("/v1/completions", prompt="x", max_tokens=1)  # the desk's lines are not those of the file
        content = server.content(server.until(server.create(data, url))["output_file_id"])
    assert untimed(content) == untimed(exported(tmp_path, checkpoint, data, "chat", **parsers))
    calls = [c["message"]["tool_calls"] for a in untimed(content) for c in a["response"]["body"]["choices"]]
    assert len({each["id"] for own in calls for each in own}) == 12


def test_metrics_tell_rows_of_batches_apart(llm, tmp_path):
    with BatchServer(llm, tmp_path) as server:
        server.until(server.create(lines_of(request(i, n=1 + i % 2) for i in range(6))))
        server.post("/v1/completions", prompt="x", max_tokens=1)
        lines = server.client.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    for source, rows in (("batch", 6), ("request", 1)):
        row = f'model_name="tiny",source="{source}"'
        for name in ("time_to_first_token", "e2e_request_latency"):
            assert values[f"hpcdecode:{name}_seconds_count{{{row}}}"] == rows
            assert 0 < values[f"hpcdecode:{name}_seconds_sum{{{row}}}"] < 60
        ended = [v for name, v in values.items() if name.startswith("hpcdecode:request_success_total") and row in name]
        assert sum(ended) == (9 if source == "batch" else 1)


def test_a_full_queue_and_several_batches(llm, tmp_path):
    with BatchServer(llm, tmp_path, max_waiting=3) as server:
        batches = [server.create(lines_of(ROWS[i::4])) for i in range(4)]
        done = [server.until(batch) for batch in batches]
        ids = [[answer["custom_id"] for answer in server.answers(each)] for each in done]
    assert ids == [[row["custom_id"] for row in ROWS[i::4]] for i in range(4)]


def test_a_cancelled_batch_keeps_what_is_done(llm, tmp_path):
    rows = [*ROWS[:20], *(request(i, **LONG) for i in range(100, 200))]
    with BatchServer(llm, tmp_path, most_rows=16) as server:
        batch = server.create(lines_of(rows))
        server.until(batch, lambda b: b["request_counts"]["completed"] >= 20)
        assert server.client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 409
        begun = server.client.post(f"/v1/batches/{batch['id']}/cancel").json()
        assert begun["status"] == "cancelling" and begun["cancelling_at"]
        done = server.until(batch)
        assert done["status"] == "cancelled" and done["cancelled_at"] and done["completed_at"] is None
        count = done["request_counts"]
        assert count["total"] == 120 and 20 <= count["completed"] < 60 and count["failed"] == 0
        answers = server.answers(done)
        assert len({a["custom_id"] for a in answers}) == len(answers) == count["completed"]
        assert server.client.post(f"/v1/batches/{batch['id']}/cancel").status_code == 409
        assert server.client.delete(f"/v1/files/{batch['input_file_id']}").json()["deleted"]
        deadline = time.monotonic() + 20
        while server.desk.running or server.desk.queued:
            assert time.monotonic() < deadline


def test_a_batch_that_expires_answers_every_request(llm, tmp_path):
    rows = [*ROWS[:5], *(request(i, **LONG) for i in range(100, 140))]
    with BatchServer(llm, tmp_path, most_rows=16) as server:
        batch = server.create(lines_of(rows))
        server.until(batch, lambda b: b["request_counts"]["completed"] >= 5)
        server.context.batches.queue.get(batch["id"], "").window = 0
        done = server.until(batch)
        answers = server.answers(done)
    assert done["status"] == "expired" and done["expired_at"] and len(answers) == 45
    expired = [a for a in answers if a["error"]]
    assert len(expired) == done["request_counts"]["failed"] > 10
    assert all(a["error"]["code"] == "batch_expired" for a in expired)


def test_results_can_be_read_while_it_runs(llm, tmp_path):
    rows = [*ROWS[:6], *(request(i, **LONG) for i in range(100, 140))]
    with BatchServer(llm, tmp_path) as server:
        batch = server.create(lines_of(rows))
        server.until(batch, lambda b: b["request_counts"]["completed"] >= 6)
    with Results(tmp_path / f"batches/{batch['id']}.h5") as results:
        assert not results.complete and results.by_id("r-3")["line"] == 4 and len(results) >= 6


def test_it_goes_on_when_the_server_starts_again(llm, tmp_path):
    rows = [request(i, max_tokens=24, ignore_eos=True) for i in range(40)]
    with BatchServer(llm, tmp_path, most_rows=8) as server:
        batch = server.create(lines_of(rows))
        whole = server.until(batch)
        expected = server.answers(whole)
    with BatchServer(llm, tmp_path, most_rows=8) as server:
        batch = server.create(lines_of(rows))
        waiting = server.create(lines_of(ROWS[:3]))
        server.until(batch, lambda b: b["request_counts"]["completed"] > 4)
    for more in (8, 8, 40):
        with BatchServer(llm, tmp_path, most_rows=8) as server:
            before = server.get(batch)["request_counts"]["completed"]
            assert before > 4
            least = min(before + more, 40)
            server.until(batch, lambda b, least=least: b["request_counts"]["completed"] >= least)
            done = server.until(batch) if more == 40 else None
            answers = server.answers(done) if done else []
            if done:
                assert server.until(waiting)["request_counts"]["completed"] == 3
    assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert untimed(lines_of(answers)) == untimed(lines_of(expected))


def test_another_model_does_not_go_on_with_it(llm, tmp_path, monkeypatch):
    with BatchServer(llm, tmp_path) as server:
        batch = server.create(lines_of(request(i, **LONG) for i in range(20)))
        server.until(batch, lambda b: b["status"] == "in_progress")
    monkeypatch.setattr("hpcdecode.serve.context.about_of", lambda engine: {"model": "another"})
    with BatchServer(llm, tmp_path) as server:
        failed = server.until(batch)
    assert failed["status"] == "failed" and failed["errors"]["data"][0]["code"] == "model_changed"
    assert not list((tmp_path / "batches").glob("*.h5*"))


@pytest.mark.parametrize("data", [b"\n\n", b"[1]\n" + lines_of(ROWS[:2]), b"\xff\xfe\n", b'{"a": 1\n'])
def test_a_file_that_is_none_fails_the_batch(llm, tmp_path, data):
    with BatchServer(llm, tmp_path) as server:
        failed = server.until(server.create(data))
    assert failed["status"] == "failed" and failed["failed_at"]
    (problem,) = failed["errors"]["data"]
    assert problem["code"] == "invalid_request_file" and problem["message"].startswith("expected")


def test_clients_see_their_own_objects_only(llm, tmp_path):
    one, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "other"))
    with BatchServer(llm, tmp_path, api_keys=("one", "other")) as server:
        client, batch = server.client, server.create(lines_of(ROWS[:3]), headers=one)
        while server.get(batch, headers=one)["status"] != "completed":
            time.sleep(0.01)
        done = server.get(batch, headers=one)
        for name in ("input_file_id", "output_file_id"):
            for path in (f"/v1/files/{done[name]}", f"/v1/files/{done[name]}/content"):
                assert client.get(path, headers=one).status_code == 200
                assert client.get(path, headers=other).status_code == 404 and client.get(path).status_code == 401
            assert client.delete(f"/v1/files/{done[name]}", headers=other).status_code == 404
        assert client.get(f"/v1/batches/{batch['id']}", headers=other).status_code == 404
        assert client.post(f"/v1/batches/{batch['id']}/cancel", headers=other).status_code == 404
        asked = {"input_file_id": done["input_file_id"], "endpoint": URL, "completion_window": "24h"}
        assert client.post("/v1/batches", json=asked, headers=other).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert client.get(path, headers=other).json()["data"] == []
            assert client.get(path, headers=one).json()["data"]
    assert b"other" not in b"".join(p.read_bytes() for p in tmp_path.rglob("*.json"))


def test_lists_come_a_page_at_a_time(llm, tmp_path):
    with BatchServer(llm, tmp_path) as server:
        made = [server.create(lines_of(ROWS[:1]))["id"] for _ in range(5)]
        page = server.client.get("/v1/batches", params={"limit": 2}).json()
        assert [b["id"] for b in page["data"]] == made[:2:-1] and page["has_more"]
        page = server.client.get("/v1/batches", params={"limit": 3, "after": page["last_id"]}).json()
        assert [b["id"] for b in page["data"]] == made[2::-1] and not page["has_more"]
        assert server.client.get("/v1/batches", params={"after": "batch_x"}).status_code == 404


def test_others_are_not_kept_waiting(llm, tmp_path):
    with BatchServer(llm, tmp_path) as server:
        batch = server.create(lines_of(request(i, **{**LONG, "max_tokens": 300}) for i in range(100)))
        server.until(batch, lambda b: b["status"] == "in_progress")
        answer = server.post("/v1/completions", prompt="Hello", max_tokens=3, temperature=0)
        assert answer.status_code == 200
        assert server.get(batch)["request_counts"]["completed"] < 40


BAD = [
    ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
    ({"completion_window": "soon"}, 400, "completion_window: expected minutes, hours or days"),
    ({"completion_window": "0h"}, 400, "completion_window"),
    ({"completion_window": "999999d"}, 400, "completion_window"),
    ({"input_file_id": "file-x"}, 404, "expected the id of a file, got 'file-x'"),
    ({"input_file_id": "../../etc/passwd"}, 404, "expected the id of a file"),
    ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
    ({"metadata": {"a": "\ud800"}}, 400, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 9}}, 400, "output_expires_after"),
]


def test_what_is_no_batch_is_refused(llm, tmp_path):
    with BatchServer(llm, tmp_path) as server:
        asked = {"input_file_id": server.upload(lines_of(ROWS[:2])), "endpoint": URL, "completion_window": "24h"}
        for more, status, message in BAD:
            body = json.dumps({**asked, **more})  # with escapes, which a client may send
            answer = server.client.post("/v1/batches", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == status, (more, answer.text)
            assert message in answer.json()["error"]["message"], answer.text
        done = server.until(server.create(lines_of(ROWS[:2])))
        answer = server.post("/v1/batches", **{**asked, "input_file_id": done["output_file_id"]})
        assert answer.status_code == 400 and "purpose batch, got batch_output" in answer.json()["error"]["message"]
        for method, path in [("GET", "batch_x"), ("POST", "batch_x/cancel"), ("GET", "..%2f..%2fetc")]:
            assert server.client.request(method, f"/v1/batches/{path}").status_code == 404
        assert server.client.get("/v1/batches", params={"limit": 0}).status_code == 400
        assert len(server.client.get("/v1/batches").json()["data"]) == 1
        for name in (*asked, "metadata"):
            for value in (None, 1, 1.5, True, [], {}, {"": None}, "", "\0", "x" * 100_000):
                assert server.post("/v1/batches", **{**asked, name: value}).status_code < 500, (name, value)
        for body in (b"", b"[]", b"nul", b'"\\ud800"', b"[" * 100_000, b"\xff"):
            answer = server.client.post("/v1/batches", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, answer.text
