"""A server of files and batches in this process: a tiny model, its engine in a thread, and the routes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.support.served import Served

URL = "/v1/completions"
ENDED = ("failed", "completed", "expired", "cancelled")


def request(number: int, url: str = URL, **body) -> dict:
    """A line of a batch's file: greedy and sampled, with log-probabilities here and there, one to three samples."""
    own = {"prompt": f"Row {number}", "max_tokens": 1 + number % 7, "n": 1 + number % 3, "seed": number % 5}
    own |= {"temperature": 0.8 * (number % 2), **({"logprobs": 1} if number % 4 == 0 else {}), **body}
    return {"custom_id": f"r-{number}", "method": "POST", "url": url, "body": own}


def lines_of(requests) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in requests)


class BatchServer(Served):
    """A server with some more ways to use it."""

    def __init__(self, llm, folder: Path, most_rows=256, **options):
        super().__init__(llm, data_dir=str(folder), **options)
        self.context.batches.queue._most_rows = most_rows

    def __exit__(self, *_):
        self.context.batches.close()  # rows in flight begin anew
        super().__exit__()

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
