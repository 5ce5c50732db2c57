"""Batches of `hpcdecode serve` by the `openai` client, across kill -9 and SIGTERM of the server."""

from __future__ import annotations

import json
import re
import signal
import time

import openai
import pytest

from tests.support.batch_servers import ENDED, URL, lines_of, request

pytestmark = pytest.mark.system

ROWS = [request(i, max_tokens=30, ignore_eos=True) for i in range(60)]


class Command:
    """`hpcdecode serve` as users start it, and a client of it; a context manager that ends it."""

    def __init__(self, hpcdecode, model, folder):
        hpcdecode.environment |= {"HPCDECODE_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
        options = ["--dtype", "float32", "--batch", 8, "--kv-memory", "16M", "--drain-seconds", 1]
        self.process = hpcdecode.start("serve", "--model", model, "--port", 0, "--data-dir", folder, *options)
        self.said, address = [], None
        while address is None:
            line = self.process.stderr.readline()
            assert line, self.said
            self.said.append(line)
            address = re.search(r"at (http://\S+/v1)", line)
        self.client = openai.OpenAI(base_url=address[1], api_key="secret", max_retries=0)

    def end(self, number):
        self.process.send_signal(number)
        self.said += self.process.communicate(timeout=60)[1].splitlines()
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate(timeout=60)

    def create(self, rows):
        file = self.client.files.create(file=("in.jsonl", lines_of(rows)), purpose="batch")
        return self.client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")

    def until(self, batch, condition=lambda batch: batch.status in ENDED):
        end = time.monotonic() + 60
        while not condition(found := self.client.batches.retrieve(batch.id)):
            assert time.monotonic() < end, found
            time.sleep(0.02)
        return found

    def answers(self, batch):
        lines = [json.loads(line) for line in self.client.files.content(batch.output_file_id).text.splitlines()]
        for line in lines:
            line["response"]["body"]["created"] = 0
        return lines


def test_a_batch_goes_on_after_kill_9_and_sigterm(hpcdecode, checkpoint, tmp_path):
    model, folder = checkpoint("llama3"), tmp_path / "data"
    with Command(hpcdecode, model, folder) as server:
        whole = server.until(server.create(ROWS))
        assert whole.status == "completed" and whole.request_counts.completed == len(ROWS)
        expected = server.answers(whole)
        assert [line["custom_id"] for line in expected] == [row["custom_id"] for row in ROWS]
        batch = server.create(ROWS)
        server.until(batch, lambda found: found.request_counts.completed >= 10)
        server.end(signal.SIGKILL)
    with Command(hpcdecode, model, folder) as server:
        server.until(batch, lambda found: found.request_counts.completed >= 30)
        assert server.end(signal.SIGTERM) == 0, server.said
    with Command(hpcdecode, model, folder) as server:
        assert server.client.batches.retrieve(batch.id).request_counts.completed >= 30  # SIGTERM loses nothing
        done = server.until(batch)
        assert done.status == "completed" and done.request_counts.model_dump() == {
            "total": len(ROWS),
            "completed": len(ROWS),
            "failed": 0,
        }
        assert server.answers(done) == expected
        cancelled = server.create([request(i, max_tokens=900, ignore_eos=True) for i in range(20)])
        server.client.batches.cancel(cancelled.id)
        assert server.until(cancelled).status == "cancelled"
        assert [found.id for found in server.client.batches.list(limit=1)] == [cancelled.id, batch.id, whole.id]
        assert server.client.files.delete(done.output_file_id).deleted
        assert done.output_file_id not in [file.id for file in server.client.files.list()]
        with pytest.raises(openai.NotFoundError):
            server.client.files.content(done.output_file_id)
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="other").batches.list()
