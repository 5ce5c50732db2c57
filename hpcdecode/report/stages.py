"""What a job's start consists of, from the command to the first step."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Stages:
    """Stages of the start, each ending when it is `done`. The first one began with the process."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._end = 0.0

    def done(self, name: str) -> None:
        now = process_seconds()
        self._seconds[name], self._end = now - self._end, now

    def text(self) -> str:
        """`ready after 4.2 s: imports 2.1, model 2.0, rows 0.1`"""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        return f"ready after {self._end:.1f} s: {parts}"


def process_seconds() -> float:
    """Seconds since this process began."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
