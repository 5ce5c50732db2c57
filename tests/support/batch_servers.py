"""A server of files and batches in this process: a tiny model, its engine in a thread, and the routes."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import httpx
import uvicorn

from hpcdecode.engine.live import LiveDesk, Room
from hpcdecode.serve.app import make_app
from hpcdecode.serve.batch_about import about_of, attributes_of
from hpcdecode.serve.batch_service import BatchService
from hpcdecode.serve.context import Context
from hpcdecode.serve.figures import figures
from hpcdecode.serve.hub import Hub
from hpcdecode.serve.page import page_router
from hpcdecode.system.signals import Signals

URL = "/v1/completions"
ENDED = ("failed", "completed", "expired", "cancelled")


def request(number: int, url: str = URL, **body) -> dict:
    """A line of a batch's file: greedy and sampled, with log-probabilities here and there, one to three samples."""
    own = {"prompt": f"Row {number}", "max_tokens": 1 + number % 7, "n": 1 + number % 3, "seed": number % 5}
    own |= {"temperature": 0.8 * (number % 2), **({"logprobs": 1} if number % 4 == 0 else {}), **body}
    return {"custom_id": f"r-{number}", "method": "POST", "url": url, "body": own}


def lines_of(requests) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in requests)


class BatchServer:
    """A server over a live desk, driven by `client`; a context manager."""

    def __init__(self, llm, folder: Path, keys=(), **options):
        engine, hub, room = llm._engine, Hub(), Room.of(llm._engine)
        model = engine.options.model
        self.desk = LiveDesk(
            engine.tokenizer, model, room, lambda events: hub.deliver(self.service.deliver(events)), most_waiting=64
        )
        about, attributes = options.pop("about", None) or about_of(engine), attributes_of(engine)
        self.service = BatchService(folder, self.desk, api_keys=keys, about=about, attributes=attributes, **options)
        context = Context(self.desk, hub, engine.tokenizer, model, ["tiny"], engine.max_positions, room.tokens)
        context.api_key = keys[0] if len(keys) == 1 else None
        page = page_router(lambda: figures(self.desk, context.models, room.tokens, context.created))
        context.routers = (self.service.router, page)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        self._http = uvicorn.Server(uvicorn.Config(make_app(context), log_config=None, timeout_graceful_shutdown=5))
        self._listener = threading.Thread(target=self._http.run, args=([self._socket],))
        self._engine = threading.Thread(target=lambda: self.desk.work(engine, Signals()))
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self):
        self._engine.start()
        self._listener.start()
        while not self._http.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_):
        self.client.close()
        self._http.should_exit = True
        self._listener.join(60)
        self._socket.close()
        self.desk.drain()
        self._engine.join(60)
        assert not self._engine.is_alive() and not self._listener.is_alive()

    def upload(self, data: bytes, **headers) -> str:
        answer = self.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def create(self, data: bytes, endpoint: str = URL, **more) -> dict:
        headers = more.pop("headers", {})
        asked = {"input_file_id": self.upload(data, headers=headers), "endpoint": endpoint, "completion_window": "24h"}
        answer = self.client.post("/v1/batches", json={**asked, **more}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, batch: dict, **headers) -> dict:
        return self.client.get(f"/v1/batches/{batch['id']}", **headers).json()

    def until(self, batch: dict, condition=lambda batch: batch["status"] in ENDED) -> dict:
        """Wait until a condition of a batch holds."""
        deadline = time.monotonic() + 60
        while not condition(found := self.get(batch)):
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        return found

    def content(self, file_id: str | None) -> bytes:
        return self.client.get(f"/v1/files/{file_id}/content").content if file_id else b""

    def answers(self, batch: dict) -> list[dict]:
        """All answers and errors of a batch that is done, by line."""
        content = self.content(batch["output_file_id"]) + self.content(batch["error_file_id"])
        return sorted(map(json.loads, content.splitlines()), key=lambda found: int(found["id"].rpartition("-")[2]))
