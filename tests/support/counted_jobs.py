"""Jobs whose generated tokens are counted while they run, so that they can be killed at a token, not at a time."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.support.commands import Command

WAIT = 180  # seconds for the tokens of a run


class CountedJobs:
    """Starts commands whose S-ranks write the tokens that they have generated into files of `folder`."""

    def __init__(self, command: Command, folder: Path):
        self.command, self.folder = command, folder
        folder.mkdir()

    def start(self, *arguments: object, ranks: int = 1, tokens: int) -> subprocess.Popen:
        """Start `hpcdecode ARGUMENTS` and wait until it has generated so many tokens, or has ended."""
        for path in self.folder.iterdir():
            path.unlink()
        line = self.command.line(self.folder, *arguments, ranks=ranks, module="tests.support.counted")
        process, end = self.command.launch(line), time.monotonic() + WAIT
        while self.tokens() < tokens and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return process

    def tokens(self) -> int:
        """Return what the command that was started last has generated."""
        return sum(int(path.read_bytes() or 0) for path in self.folder.iterdir())
