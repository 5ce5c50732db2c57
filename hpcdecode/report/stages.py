"""What a job's start consists of, from the command to the first step."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Stages:
    """Stages of the start, each ending when it is `done`. The first one began with the process."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.seconds = 0.0  # from the start of the process to the end of the last stage

    def done(self, name: str) -> None:
        now = process_seconds()
        self._seconds[name], self.seconds = now - self.seconds, now

    def text(self) -> str:
        """`ready after 4.2 s: imports 2.1, model 2.0, rows 0.1`"""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        return f"ready after {self.seconds:.1f} s: {parts}"


def process_seconds() -> float:
    """Seconds since this process began, to a clock tick (10 ms)."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
