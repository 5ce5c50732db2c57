"""Streams and events as those of `torch.cuda`, of a device that does its work late and in any order that they allow."""

from __future__ import annotations

import random
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


class LazyStream:
    """Work in order. A wait holds it up until an event has been reached."""

    def __init__(self, device=None):
        self.work = []

    def wait_event(self, event):
        place = event.place  # that it was recorded at last
        self.work.append(("wait", event, place))

    def step(self):
        """Do one piece of work; return whether there was one that could be done."""
        if not self.work:
            return False
        kind, what, place = self.work[0]
        if kind == "wait" and what.reached < place:
            return False
        self.work.pop(0)
        if kind == "copy":
            what()
        if kind == "mark":
            what.reached = max(what.reached, place)
        return True


class LazyEvent:
    def __init__(self, enable_timing=False):
        self.place = self.reached = 0

    def record(self, stream):
        self.place += 1
        stream.work.append(("mark", self, self.place))

    def query(self):
        return self.reached == self.place


class LazyDevice(TorchFunctionMode):
    """Puts copies on the current stream in place of doing them; `advance` does some of what streams hold.

    Args:
        monkeypatch: Replaces what `torch.cuda` has.
        seed: Of the order.
    """

    def __init__(self, monkeypatch, seed):
        super().__init__()
        self.draw, self.streams, self.main = random.Random(seed), [], LazyStream()
        self.current = self.main
        self.streams.append(self.main)
        for name, value in {
            "Stream": self._stream,
            "Event": LazyEvent,
            "stream": self._in_stream,
            "current_stream": lambda device=None: self.current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def _stream(self, device=None):
        self.streams.append(LazyStream())
        return self.streams[-1]

    @contextmanager
    def _in_stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.copy_:
            to, source = args
            self.current.work.append(("copy", lambda: to.copy_(source), 0))
            return to
        if kwargs.pop("pin_memory", False):
            return func(*args, **kwargs).fill_(float("nan"))
        return func(*args, **kwargs)

    def advance(self):
        """Do one piece of work of a stream that has some, drawn at random; return whether there was any."""
        streams = self.draw.sample(self.streams, len(self.streams))
        with torch._C.DisableTorchFunction():
            return any(stream.step() for stream in streams)
