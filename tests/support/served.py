"""A server in this process: a live desk with the thread of its engine, and uvicorn with an event loop of its own."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn

from hpcdecode import LLM
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.live import LiveDesk, Room
from hpcdecode.serve.app import make_app
from hpcdecode.serve.context import Context
from hpcdecode.serve.options import ServeOptions
from hpcdecode.serve.server import open_listener
from hpcdecode.system.signals import Signals


class Served:
    """A server that runs until the end of a `with` block.

    Args:
        llm: Its model.
        options: Of the server.

    Attributes:
        url: Where it listens.
        client: For requests to it.
        error: What ended the engine.
    """

    def __init__(self, llm: LLM, **options: Any) -> None:
        engine = llm._engine
        given = {"model": engine.options.model, "served_model_name": ("tiny",), "port": 0, **options}
        self.context = Context(engine, ServeOptions(**given).check())
        most, adapters = self.context.options.max_waiting, self.context.adapters
        self.desk = LiveDesk(engine.tokenizer, given["model"], Room.of(engine), self.context.deliver, most, adapters)
        self.context.open(self.desk)
        self.error: BaseException | None = None
        self.engine = threading.Thread(target=self._work, args=(engine,), name="served-engine")
        self._socket = open_listener(self.context.options)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(make_app(self.context), log_level="warning", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._listener = threading.Thread(target=self._server.run, args=([self._socket],))
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> Served:
        self.engine.start()
        self._listener.start()
        wait_for(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.desk.drain()
        self.engine.join(60)
        self._server.should_exit = True
        self._listener.join(60)
        self._socket.close()
        assert not self.engine.is_alive() and not self._listener.is_alive()

    def _work(self, engine: Engine) -> None:
        try:
            self.desk.work(engine, engine.scales(self.desk), Signals())
        except BaseException as error:
            self.error = error

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def idle(self) -> bool:
        """Return whether no row is left."""
        return not (self.desk.running or self.desk.queued or self.context.hub.tickets)


def wait_for(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "expected the condition to become true in time"
        time.sleep(0.01)


@contextlib.contextmanager
def served(llm: LLM, **options: Any) -> Iterator[Served]:
    with Served(llm, **options) as server:
        yield server


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which must have its end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, empty = response.text.split("\n\n")
    assert done == "data: [DONE]" and empty == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the choices that the chunks of a stream add up to, in the form of an answer at once."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks(response):
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"index": part["index"], "logprobs": None})
            if "delta" in part:
                _add(whole.setdefault("message", {}), part["delta"])
            else:
                whole["text"] = whole.get("text", "") + part["text"]
            if part["logprobs"] is not None:
                whole["logprobs"] = whole["logprobs"] or {}
                _add(whole["logprobs"], part["logprobs"])
            assert "finish_reason" not in whole, "nothing comes after the finish reason"
            if part["finish_reason"] is not None:
                whole["finish_reason"] = part["finish_reason"]
    return [choice for _, choice in sorted(choices.items())]


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        whole[name] = whole[name] + value if name in whole else value


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error that an answer must be."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
