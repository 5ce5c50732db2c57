"""The frame of hostile trials: a named situation, a command, and the ending that it must have.

Every trial also holds that the command ends in time, shows no traceback, and leaves no temporary file behind.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run

OK, FAILED, REFUSED, ROW_ERRORS = 0, 1, 2, 3  # exit codes of the command
GENERATE = ("generate", "p.jsonl", "--model", "demo", "--dtype", "float32", "--max-tokens", 8, "-o", "out.h5")
ROW = '{"prompt": "def add(a, b):", "max_tokens": 8}\n'


@dataclass(frozen=True)
class Trial:
    """One hostile situation.

    Args:
        name: of the trial, shown by pytest.
        arrange: called with the trial's directory before the command runs. It makes files, damages them, and may return
            options of `subprocess.Popen` for the command (`env`, `preexec_fn`, `stdin`).
        command: arguments of `hpcdecode`, run in the trial's directory.
        code: exit codes that the command may end with.
        says: regular expression that its standard error must contain.
        check: called with the directory and the finished command, for what else must hold.
        seconds: until the command must have ended.
    """

    name: str
    arrange: Callable[[Path], dict[str, Any] | None]
    command: tuple[object, ...] = GENERATE
    code: int | tuple[int, ...] = REFUSED
    says: str = ""
    check: Callable[[Path, subprocess.CompletedProcess], None] | None = None
    seconds: float = 60
    marks: tuple = field(default=())

    def run(self, hpcdecode: Any, directory: Path) -> subprocess.CompletedProcess:
        """Arrange the situation, run the command and check its ending; `hpcdecode` is the fixture of that name."""
        options = {"env": hpcdecode.environment, **(self.arrange(directory) or {})}
        result = run(hpcdecode.line(*self.command), cwd=directory, timeout=self.seconds, **options)
        self.verify(result)
        if self.check is not None:
            self.check(directory, result)
        return result

    def verify(self, result: subprocess.CompletedProcess) -> None:
        """Check exit code and messages of a finished command."""
        codes = self.code if isinstance(self.code, tuple) else (self.code,)
        assert result.returncode in codes, (result.returncode, result.stderr[-4000:])
        assert "Traceback" not in result.stderr, result.stderr[-4000:]
        assert re.search(self.says, result.stderr, re.DOTALL), (self.says, result.stderr[-4000:])


def each(trials: list[Trial]):
    """Decorate a test to run once for every trial, as its argument `trial`."""
    return pytest.mark.parametrize("trial", [pytest.param(t, id=t.name, marks=t.marks) for t in trials])
