"""Clocks of what a device does: this host's, and a GPU's own."""

from __future__ import annotations

from collections import deque
from time import perf_counter

import torch


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """Return a clock of what is done on a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """A context that counts the seconds of what is done inside."""

    def __init__(self) -> None:
        self._seconds = self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += perf_counter() - self._begun

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._seconds


class DeviceClock:
    """A context that counts the seconds, by the device's own time, of what a device is told to do inside."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._begun, self._now()))
        while self._spans and self._spans[0][1].query():
            self._count()

    def seconds(self) -> float:
        """Return the seconds so far; wait for the device."""
        if self._spans:
            self._spans[-1][1].synchronize()
        while self._spans:
            self._count()
        return self._seconds

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _count(self) -> None:
        begun, ended = self._spans.popleft()
        self._seconds += begun.elapsed_time(ended) / 1e3
