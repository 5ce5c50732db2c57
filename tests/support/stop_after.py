"""A stop of a job at a given moment, and a copy of what is on disk then."""

from __future__ import annotations

import shutil
from pathlib import Path

from hpcdecode.data.results import writer as results
from hpcdecode.system.signals import DRAINED, Signals


class StopAfter(Signals):
    """Stop the job at its `polls`-th rotation of the lanes; a crash keeps what is on disk at that moment.

    It stands in for a signal, which would come at another step every time.
    """

    def __init__(self, polls: int | None, output: Path, crash: bool):
        super().__init__()
        self._polls, self._output, self._crash = polls, output, crash
        self.stopped = False

    def __enter__(self) -> StopAfter:
        return self

    def hold_interrupts(self) -> None:
        """No signal is held: the test ends as any process does."""

    @property
    def stopping(self) -> bool:
        if self.stopped or self._polls is None:
            return self.stopped
        self._polls -= 1
        self.stopped = self._polls < 0
        if self.stopped and self._crash:
            copy(self._output, kept(self._output))
        return self.stopped

    @property
    def exit_code(self) -> int:
        return DRAINED if self.stopped else 0


def kept(output: Path) -> Path:
    return output.with_name("kept.h5")


def remove(output: Path) -> None:
    output.unlink(missing_ok=True)
    shutil.rmtree(results.parts_folder(output), ignore_errors=True)


def copy(source: Path, target: Path) -> None:
    """What a results file and its parts are now; nobody writes them meanwhile."""
    remove(target)
    shutil.copy(source, target)
    shutil.copytree(results.parts_folder(source), results.parts_folder(target))
