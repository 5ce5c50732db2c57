"""The order in which a CUDA graph is captured, on a CUDA that only takes notes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from hpcdecode.model.run.cuda_graphs import GraphRecorder
from hpcdecode.model.run.recorder import Unrecordable


@pytest.fixture
def notes(monkeypatch):
    """Calls of CUDA, in order."""
    noted = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            noted.append(f"{self.name} waits for {other.name}")

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            noted.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self):
            noted.append("end")

        def replay(self):
            noted.append("replay")

    @contextmanager
    def on(stream):
        noted.append(f"on {stream.name}")
        yield
        noted.append(f"off {stream.name}")

    patches = {
        "Stream": lambda _device: Stream("own"),
        "current_stream": lambda _device: Stream("current"),
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": Graph,
        "stream": on,
        "synchronize": lambda _device: noted.append("synchronize"),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: noted.append(f"waits {mode}"),
    }
    for name, patch in patches.items():
        monkeypatch.setattr(torch.cuda, name, patch)
    return noted


def test_work_has_run_twice_on_the_stream_before_it_is_captured(notes):
    recorder = GraphRecorder(torch.device("cuda"))
    recorder.record(lambda: notes.append("work"))()
    assert notes == [
        *("own waits for current", "on own", "work"),
        *("waits error", "work", "waits 0"),
        *("synchronize", "begin pool thread_local", "work", "end", "off own", "current waits for own", "replay"),
    ]
    recorder.record(lambda: None)
    assert notes.count("begin pool thread_local") == 2  # one pool for all


@pytest.mark.parametrize("at", [2, 3])
def test_what_waits_for_the_device_is_not_captured(notes, at):
    """at: the run in which it fails, the second outside of the graph, or that into it."""
    runs = []

    def work():
        runs.append(None)
        if len(runs) == at:
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(Unrecordable):
        GraphRecorder(torch.device("cuda")).record(work)
    assert notes[-1] == "current waits for own" and ("end" in notes) == (at == 3)


def test_other_errors_are_not_hidden(notes):
    def work():
        if "waits error" in notes:
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        GraphRecorder(torch.device("cuda")).record(work)
