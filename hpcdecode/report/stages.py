"""Stages of a job's start, from the command to the first step."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)


class Stages:
    """Stages of the start, each of which ends when it is `done`. The first one began with the process.

    Args:
        announce: Log every stage that is done, at level DEBUG.

    Attributes:
        seconds: Seconds from the start of the process to the end of the last stage.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self._seconds: dict[str, float] = {}
        self._announce = announce
        self.seconds = 0.0

    def done(self, name: str) -> None:
        """End the current stage, whose name is `name`."""
        now = process_seconds()
        self._seconds[name], self.seconds = now - self.seconds, now
        if self._announce:
            logger.debug(f"hpcdecode: {name}: {self._seconds[name]:.2f} s, done {now:.2f} s after the start")

    def text(self) -> str:
        """Return a line such as `ready after 4.2 s: imports 2.1, model 2.0, rows 0.1`."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        return f"ready after {self.seconds:.1f} s: {parts}"


def process_seconds() -> float:
    """Return the seconds since this process began, to a clock tick (10 ms)."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
