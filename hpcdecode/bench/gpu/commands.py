"""Commands that parts of the first day run, with an end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_MOST_TEXT = 6000  # characters of an output that are kept


class Ended(NamedTuple):
    """A command that has ended.

    Attributes:
        code: Exit code; None if it took too long.
        text: The end of what it printed on both streams.
    """

    code: int | None
    text: str


def run(line: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command and return how it ended; kill it, and what it started, after some seconds."""
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Ended(None, text[-_MOST_TEXT:])
    return Ended(process.returncode, text[-_MOST_TEXT:])
