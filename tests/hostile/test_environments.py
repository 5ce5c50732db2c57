"""Environments that fail a job: a clear ending, and the same rows once it has gone on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.jobs import AGAIN, LAUNCHER, SECONDS, contents, damaged, goes_on, needs_root
from tests.hostile.trial import FAILED, OK, REFUSED, ROW_ERRORS, Trial, each
from tests.support.commands import Command, rank_of, run

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_core")]


def limits(**values: int) -> Callable[[Path], dict]:
    def set_limits() -> None:
        for name, value in values.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))

    return lambda directory: {"preexec_fn": set_limits}


def alone(name: str, arrange: Callable, says: str = "", code=ROW_ERRORS, command: tuple = AGAIN, **more) -> Trial:
    return Trial(name, arrange, command, code, says, seconds=SECONDS, **more)


NO_KV = tuple(part for part in AGAIN if part not in ("--kv-memory", "64M"))
ENVIRONMENTS = [
    alone("file-size", limits(FSIZE=40_000), "writing failed: File too large", REFUSED),
    alone("32-files", limits(NOFILE=32)),
    alone("no-memory", limits(AS=500 << 20), "more memory|bad_alloc", (REFUSED, FAILED, -signal.SIGABRT)),
    alone("little-memory", limits(AS=2 << 30), command=NO_KV),
    alone(
        "more-than-there-is", lambda d: None, "--kv-memory: expected at most", REFUSED, (*AGAIN, "--kv-memory", "9T")
    ),
    alone(
        "more-than-the-limit", limits(AS=3 << 30), r"--kv-memory: .*ulimit -v", REFUSED, (*AGAIN, "--kv-memory", "4G")
    ),
]


@each(ENVIRONMENTS)
def test_limits(hpcdecode, jobs, fresh, trial):
    result = trial.run(hpcdecode, fresh)
    if result.returncode != ROW_ERRORS:
        goes_on(hpcdecode, fresh, jobs[1])
    assert contents(fresh / "out.h5") == jobs[1]


def test_a_clock_that_goes_back(hpcdecode, jobs, fresh):
    line = [sys.executable, str(LAUNCHER), "clock", *map(str, AGAIN), "--checkpoint-every", "0.05"]
    result = run(line, cwd=fresh, env=hpcdecode.environment, timeout=SECONDS)
    assert result.returncode == ROW_ERRORS and "Traceback" not in result.stderr, result.stderr
    assert contents(fresh / "out.h5") == jobs[1]


def unshared(script: str, line: list[str]) -> list[str]:
    """The command in mounts of its own, which `script` changes before."""
    return ["unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh", *line]


@needs_root
def test_no_shared_memory_for_mpi(hpcdecode, jobs, fresh):
    line = unshared("mount -t tmpfs -o size=1m tmpfs /dev/shm", Command(fresh).line(*AGAIN, ranks=3))
    result = run(line, cwd=fresh, env=hpcdecode.environment, timeout=SECONDS)
    assert result.returncode not in (OK, ROW_ERRORS) and "Traceback" not in result.stderr
    assert "of shared memory (/dev/shm) are free: MPI may end with a bus error" in result.stdout + result.stderr
    assert not (fresh / "out.h5").exists()
    goes_on(hpcdecode, fresh, jobs[1])


@needs_root
@pytest.mark.parametrize("filled", [True, False])
def test_a_cache_that_cannot_be_written(hpcdecode, jobs, fresh, filled):
    cache = fresh / "cache"
    shutil.copytree(os.environ["HPCDECODE_CACHE"], cache) if filled else cache.mkdir()
    script = f"mount --bind {cache} {cache} && mount -o remount,bind,ro {cache}"
    environment = hpcdecode.environment | {"HPCDECODE_CACHE": str(cache)}
    result = run(unshared(script, hpcdecode.line(*AGAIN)), cwd=fresh, env=environment, timeout=SECONDS)
    assert result.returncode == ROW_ERRORS, result.stderr
    assert contents(fresh / "out.h5") == jobs[1]


@pytest.mark.parametrize("how", ["half", "empty", "flipped", "a-byte-less", "a-folder"])
def test_a_damaged_cache(hpcdecode, jobs, fresh, how):
    cache = fresh / "cache"
    shutil.copytree(os.environ["HPCDECODE_CACHE"], cache)
    for file in list(cache.iterdir()):
        if how == "a-folder":
            file.unlink()
            file.mkdir()
        else:
            damaged(lambda _, file=file: file, how)(cache)
    environment = hpcdecode.environment | {"HPCDECODE_CACHE": str(cache)}
    result = run(hpcdecode.line(*AGAIN), cwd=fresh, env=environment, timeout=SECONDS)
    assert result.returncode == ROW_ERRORS, result.stderr
    assert contents(fresh / "out.h5") == jobs[1]


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_cache_of_another_user(hpcdecode, jobs, fresh, mode):
    """Who may not write there, or not even read, traces the model again."""
    cache = fresh / "cache"
    shutil.copytree(os.environ["HPCDECODE_CACHE"], cache)
    for path in (*cache.iterdir(), cache):
        os.chown(path, 12345, 12345)
        path.chmod(mode if path.is_dir() else mode & 0o644)
    environment = hpcdecode.environment | {"HPCDECODE_CACHE": str(cache)}
    line = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", *hpcdecode.line(*AGAIN)]
    result = run(line, cwd=fresh, env=environment, timeout=SECONDS)
    assert result.returncode == ROW_ERRORS, result.stderr
    assert contents(fresh / "out.h5") == jobs[1]


def test_two_jobs_on_one_output(hpcdecode, jobs, fresh):
    both = [hpcdecode.start(*AGAIN) for _ in range(2)]
    ends = [process.communicate(timeout=SECONDS)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([REFUSED, ROW_ERRORS], [ROW_ERRORS, ROW_ERRORS]) and "Traceback" not in "".join(ends), ends
    if codes[0] == REFUSED:
        refused = next(end for end, process in zip(ends, both, strict=True) if process.returncode == REFUSED)
        assert "another job" in refused or "File exists" in refused
    assert contents(fresh / "out.h5") == jobs[1]


# Processes that stop


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    end = time.monotonic() + SECONDS
    while not condition() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stopped_process_goes_on(hpcdecode, jobs, fresh):
    process = hpcdecode.start(*AGAIN, "--checkpoint-every", 0.05)
    wait_for((fresh / "out.h5").exists, process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == ROW_ERRORS, err
    assert contents(fresh / "out.h5") == jobs[1]


def test_a_stopped_rank_ends_the_job_by_name(hpcdecode, jobs, fresh):
    command = (*AGAIN, "--checkpoint-every", 0.05)
    process = hpcdecode.start(*command, "--stall-timeout", 4, "--batch", 2, ranks=3)
    wait_for((fresh / "out.h5").exists, process)
    rank = rank_of(process, 2)
    rank.send_signal(signal.SIGSTOP)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        rank.kill() if rank.is_running() else None
    assert process.returncode not in (OK, ROW_ERRORS) and "rank 2" in out + err and "stalled" in out + err
    goes_on(hpcdecode, fresh, jobs[1])
