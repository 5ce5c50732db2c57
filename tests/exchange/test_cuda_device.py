"""What a GPU is told, and on which stream: by streams and events that write down what they are asked for."""

from __future__ import annotations

from contextlib import contextmanager
from mmap import PAGESIZE

import pytest
import torch

from hpcdecode.exchange.device import CudaDevice, CudaMemory, PlainMemory, open_memory
from hpcdecode.exchange.memory import stretches

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Recorded:
    """A stream or an event of a log."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")

    def record(self, stream):
        self.log.append(f"{self.name} on {stream.name}")


class Matrix:
    """What is copied, on the stream that is current."""

    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name

    def copy_(self, other, non_blocking):
        assert non_blocking
        self.gpu.log.append(f"{other.name} to {self.name} on {self.gpu.current.name}")


class Gpu:
    def __init__(self, monkeypatch):
        self.log, self.streams, self.events = [], iter(("out", "in")), iter(f"e{i}" for i in range(99))
        self.compute = self.current = Recorded(self.log, "compute")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: Recorded(self.log, next(self.streams)))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Recorded(self.log, next(self.events)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.compute)
        monkeypatch.setattr(torch.cuda, "stream", self.using)

    @contextmanager
    def using(self, stream):
        self.current = stream
        yield
        self.current = self.compute


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_parts_leave_behind_what_was_computed_each_with_its_event(gpu):
    device, a, b, c = CudaDevice(GPU), *(Matrix(gpu, name) for name in "abc")
    mark = device.tell(lambda: gpu.log.append("gather"))
    device.out_parts([[(b, a)], [(c, a)]], mark)
    assert gpu.log == [
        *("gather", "e0 on compute", "out waits for e0"),
        *("a to b on out", "e1 on out", "a to c on out", "e2 on out"),
    ]


def test_what_comes_back_waits_for_the_mark_alone_and_computing_for_it(gpu):
    device, host, there = CudaDevice(GPU), Matrix(gpu, "host"), Matrix(gpu, "there")
    mark = device.tell(lambda: None)
    gpu.log.clear()
    device.into([(there, host)], mark)
    assert gpu.log == ["in waits for e0", "host to there on in", "e1 on in", "compute waits for e1"]


class Cudart:
    """Registers memory, in so far as there is room.

    Attributes:
        known: Bytes by address.
    """

    def __init__(self, room):
        self.room, self.known = room, {}

    def cudaHostRegister(self, address, nbytes, flags):
        if nbytes > self.room:
            return 2
        self.known[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.known[address]
        return 0


def test_shared_memory_is_registered_until_it_is_freed(monkeypatch, caplog):
    cudart = Cudart(room=100)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = open_memory(CPU, GPU)
    memory.pin(64, 100)
    assert cudart.known == {64: 100}
    memory.pin(4096, 101)
    assert "101 bytes of shared memory are not pinned (CUDA error 2)" in caplog.text
    memory.unpin(4096)
    memory.unpin(64)
    assert cudart.known == {}


def test_only_memory_that_a_gpu_computes_with_is_pinned():
    assert isinstance(open_memory(CPU, CPU), PlainMemory)
    memory = open_memory(GPU, GPU)
    assert isinstance(memory, CudaMemory) and memory.private == GPU


def test_a_page_is_registered_once():
    memory = torch.empty(3 * PAGESIZE, dtype=torch.uint8)
    first = memory.data_ptr()
    beside = [memory[:10], memory[10:20], memory[20:20], memory[2 * PAGESIZE + 30 :]]
    assert stretches(beside) == [(first, first + 20), (first + 2 * PAGESIZE + 30, first + 3 * PAGESIZE)]


def test_a_mark_of_another_device_is_refused(gpu):
    with pytest.raises(TypeError, match="expected a mark of this device, got Recorded"):
        CudaDevice(GPU).into([], Recorded([], "mark"))
