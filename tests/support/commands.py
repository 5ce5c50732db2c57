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

from tests.support.forkserver import ForkServer

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds; every launch has an end
WITH_PRRTE = (Path(sys.executable).parent / "prterun").exists()  # Open MPI's launcher, not that of MPICH


class Command:
    """`hpcdecode ARGS` in a directory, on one process or under mpiexec.

    Called, its processes are forked from `server`, if that is given, no library's variable was changed, and ranks
    are started by MPICH.
    """

    def __init__(self, directory: Path, server: ForkServer | None = None):
        self.directory, self.server = directory, server
        self.environment = environment()

    def line(self, *arguments: object, ranks: int = 1) -> list[str]:
        return [*launcher(ranks), sys.executable, "-m", "hpcdecode", *map(str, arguments)]

    def __call__(self, *arguments: object, ranks: int = 1, timeout: float = TIMEOUT) -> subprocess.CompletedProcess:
        options = {"cwd": self.directory, "env": self.environment, "timeout": timeout}
        if self.server is None or _of_libraries(self.environment) != _of_libraries(self.server.environment):
            return run(self.line(*arguments, ranks=ranks), **options)
        if ranks > 1:
            return run([*launcher(ranks), *python(self.server, "hpcdecode"), *map(str, arguments)], **options)
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


def python(server: ForkServer, module: str) -> list[str]:
    """Return the command of a rank that runs a module, forked from `server` if its launcher is that of MPICH."""
    return [sys.executable, "-m", module] if WITH_PRRTE else server.rank(module)


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


def rank_of(process: subprocess.Popen, rank: int, seconds: float = 20) -> psutil.Process:
    """The process of a rank of those that a launcher starts; waits until it is there."""
    names, end = {f"{name}={rank}" for name in ("PMI_RANK", "PMIX_RANK")}, time.monotonic() + seconds
    while time.monotonic() < end:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                own = {f"{name}={value}" for name, value in child.environ().items()}
                if names & own and "python" in child.name():
                    return child
        time.sleep(0.05)
    raise AssertionError(f"no rank {rank} after {seconds} s")
