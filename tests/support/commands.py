"""Commands with an end: `hpcdecode` and launchers, as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.forked_rank import NAME
from tests.support.forkserver import ForkServer

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds; every launch has an end


class Command:
    """`hpcdecode ARGS` in a directory, on one process or under mpiexec.

    Ranks are forked from `server`, and so is a process alone that is run to its end, if that is given and no
    library's variable was changed.
    """

    def __init__(self, directory: Path, server: ForkServer | None = None):
        self.directory, self.server = directory, server
        self.environment = environment()

    def line(self, *arguments: object, ranks: int = 1, module: str = "hpcdecode") -> list[str]:
        forked = ranks > 1 and self._serves()
        command = self.server.rank(module) if forked else [sys.executable, "-m", module]
        return [*launcher(ranks), *command, *map(str, arguments)]

    def _serves(self) -> bool:
        """Tell whether the server has the libraries as this command is to have them."""
        return self.server is not None and _of_libraries(self.environment) == _of_libraries(self.server.environment)

    def __call__(self, *arguments: object, ranks: int = 1, timeout: float = TIMEOUT) -> subprocess.CompletedProcess:
        if ranks > 1 or not self._serves():
            line = self.line(*arguments, ranks=ranks)
            return run(line, cwd=self.directory, env=self.environment, timeout=timeout)
        try:
            return self.server.run([*map(str, arguments)], self.directory, self.environment, timeout)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"no end after {timeout} s: {error.cmd}\n{error.output[-2000:]}\n{error.stderr[-4000:]}")

    def start(self, *arguments: object, ranks: int = 1) -> subprocess.Popen:
        return self.launch(self.line(*arguments, ranks=ranks))

    def launch(self, line: list[str]) -> subprocess.Popen:
        return subprocess.Popen(
            line,
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def launcher(ranks: int, *, always: bool = False) -> list[str]:
    """Return what starts so many ranks of the command that follows; nothing for one process, unless `always`."""
    return [] if ranks == 1 and not always else [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)]


def environment() -> dict[str, str]:
    """Return the variables that every command gets. One that crashes says where."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
    for name in ("HPCDECODE_MODEL", "TORCHINDUCTOR_CACHE_DIR"):  # the latter is set by torch in this process
        own.pop(name, None)
    return own


def _of_libraries(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(("HPCDECODE_", "PYTEST_", "XDG_"))}


def run(line: list[str], timeout: float = TIMEOUT, **options) -> subprocess.CompletedProcess:
    """Run to the end, or end the whole process group at the timeout and fail."""
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end after {timeout} s: {' '.join(line)}\n{out[-2000:]}\n{err[-4000:]}")
    return subprocess.CompletedProcess(line, process.returncode, out, err)


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the processes that a launcher has started, and those forked for them."""
    started = psutil.Process(process.pid).children(recursive=True)
    return started + [forked for child in started if (forked := _forked(child))]


def rank_of(process: subprocess.Popen, rank: int, seconds: float = 20) -> psutil.Process:
    """Return the process of a rank of those that a launcher starts; waits until it is there."""
    names, end = {f"{name}={rank}" for name in ("PMI_RANK", "PMIX_RANK")}, time.monotonic() + seconds
    while time.monotonic() < end:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                own = {f"{name}={value}" for name, value in child.environ().items()}
                if names & own and (itself := _itself(child)):
                    return itself
        time.sleep(0.05)
    raise AssertionError(f"no rank {rank} after {seconds} s")


def _itself(process: psutil.Process) -> psutil.Process | None:
    """Return a rank's process, or the one that stands in its place; None for another program, or before it is there."""
    if any(argument.endswith("forked_rank.py") for argument in process.cmdline()):
        return _forked(process)
    return process if "python" in process.name() else None


def _forked(process: psutil.Process) -> psutil.Process | None:
    """Return the process that the fork server has made for one, which bears its number as its name."""
    with suppress(psutil.Error):
        name = process.name()
        if name.startswith(NAME):
            return psutil.Process(int(name.removeprefix(NAME)))
    return None
