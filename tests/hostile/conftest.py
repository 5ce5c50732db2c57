"""A job that was killed, for the trials of this folder."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.jobs import AGAIN, JOB, KILLED_AT, LAUNCHER, SECONDS, contents, prompts
from tests.hostile.trial import ROW_ERRORS
from tests.support.commands import Command, run


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """Each job computes on one thread: on a busy machine several would wait for each other."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture(scope="session")
def jobs(tmp_path_factory) -> tuple[Path, dict]:
    """A job that was killed, and what it gives undisturbed."""
    directory = tmp_path_factory.mktemp("jobs")
    prompts(directory)
    command = Command(directory)
    whole = command(*JOB, "-o", "whole.h5", timeout=SECONDS)
    assert whole.returncode == ROW_ERRORS, whole.stderr
    line = [sys.executable, str(LAUNCHER), "killed", str(KILLED_AT), *map(str, AGAIN)]
    killed = run(line, cwd=directory, env=command.environment, timeout=SECONDS)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return directory, contents(directory / "whole.h5")


@pytest.fixture
def fresh(jobs, tmp_path) -> Path:
    """A directory with the prompts alone."""
    shutil.copy(jobs[0] / "p.jsonl", tmp_path)
    return tmp_path


@pytest.fixture
def killed(jobs, fresh) -> Path:
    """A directory with the killed job."""
    shutil.copy(jobs[0] / "out.h5", fresh)
    shutil.copytree(jobs[0] / "out.h5.parts", fresh / "out.h5.parts")
    return fresh
