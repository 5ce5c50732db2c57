"""What the tests share: checkpoints on disk, and commands with an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
TIMEOUT = 240  # seconds; every launch has an end


class Command:
    """`hpcdecode ARGS` in a directory, on one process or under mpiexec."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.environment.pop("HPCDECODE_MODEL", None)

    def line(self, *arguments: object, ranks: int = 1) -> list[str]:
        launcher = [] if ranks == 1 else [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)]
        return [*launcher, sys.executable, "-m", "hpcdecode", *map(str, arguments)]

    def __call__(self, *arguments: object, ranks: int = 1, timeout: float = TIMEOUT) -> subprocess.CompletedProcess:
        return run(self.line(*arguments, ranks=ranks), cwd=self.directory, env=self.environment, timeout=timeout)

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


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Traces made by the tests are kept for the session, and not in the user's cache."""
    os.environ["HPCDECODE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def hpcdecode(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a small random checkpoint, by architecture; built once a session."""
    from tests.support.models import build

    directory, built = tmp_path_factory.mktemp("checkpoints"), {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = Path(build(name, directory / name))
        return built[name]

    return get


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Directory of a trained model, "smol" or "gemma"; the test is skipped where it cannot be fetched."""
    from tests.support.real_models import fetch

    def get(name: str) -> Path:
        try:
            return fetch(name)
        except (ImportError, subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"model {name} cannot be fetched: {error}")

    return get


@pytest.fixture(scope="session")
def mpiexec() -> Callable[..., subprocess.CompletedProcess]:
    """Run a script of the tests on several ranks; the first that fails ends them all."""

    def launch(ranks: int, script: str, *arguments: object, timeout: float = TIMEOUT):
        line = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks), sys.executable, "-m", "mpi4py"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "1000"}
        return run([*line, str(ROOT / script), *map(str, arguments)], env=environment, timeout=timeout)

    return launch
