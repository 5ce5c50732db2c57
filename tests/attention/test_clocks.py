"""The clock of a GPU, as it is, over events that are emulated and late."""

from __future__ import annotations

from typing import ClassVar

import torch

from hpcdecode.attention import clocks


class TimedEvent:
    """An event of a device whose time is the number of events so far, and which is one event late."""

    made: ClassVar[list[TimedEvent]] = []

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self, stream):
        self.at, self.waited = len(self.made), False
        self.made.append(self)

    def query(self):
        return self.waited or self.at < len(self.made) - 1

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, other):
        assert self.query() and other.query(), "the time of an event that has not been reached"
        return 1000.0 * (other.at - self.at)


def test_a_clock_adds_up_spans_of_the_device_and_waits_only_when_it_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(TimedEvent, "made", [])
    clock = clocks.clock_of(torch.device("cuda", 0))
    for _ in range(3):
        with clock:
            pass
    assert not any(event.waited for event in TimedEvent.made)
    assert clock.seconds() == 3.0
    assert TimedEvent.made[-1].waited
    with clock:
        pass
    assert clock.seconds() == 4.0
