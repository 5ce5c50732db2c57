"""How a job ends that does not run to its end: signals, errors on a rank, a rank that dies."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hpcdecode.system.signals import DRAINED
from hpcdecode.system.timeline import OPERATIONS
from tests.support.commands import launcher, rank_of
from tests.support.long_jobs import end, finished, wait_for_rows

OPEN_MPI = (Path(sys.executable).parent / "prterun").exists()


ends_ranks_itself = pytest.mark.skipif(OPEN_MPI, reason="Open MPI's mpiexec ends the ranks itself")


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        (1, signal.SIGINT),
        pytest.param(3, signal.SIGINT, marks=[ends_ranks_itself, pytest.mark.full]),
        pytest.param(3, signal.SIGTERM, marks=ends_ranks_itself),
    ],
)
def test_a_signal_ends_all_ranks_and_keeps_finished_rows(hpcdecode, long_job, tmp_path, ranks, number):
    process = hpcdecode.start(*long_job, ranks=ranks)
    wait_for_rows(tmp_path / "out.h5", process)
    process.send_signal(number)
    code, err = end(process, 20)
    assert code == 128 + number, err
    rows, complete = finished(tmp_path / "out.h5")
    assert rows and not complete
    assert all(len(tokens) == 8 + (line - 1) % 100 for line, tokens in rows.items())


@pytest.mark.parametrize("layout", ["replicas", pytest.param("split", marks=pytest.mark.full)])
def test_signals_to_others_change_nothing_and_one_to_the_lead_drains_the_job(hpcdecode, long_job, tmp_path, layout):
    process = hpcdecode.start(*long_job, "--layout", layout, ranks=3)
    wait_for_rows(tmp_path / "out.h5", process)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        for rank in (1, 2):
            rank_of(process, rank).send_signal(number)
    before = len(finished(tmp_path / "out.h5")[0])
    wait_for_rows(tmp_path / "out.h5", process, more_than=before)
    rank_of(process, 0).send_signal(signal.SIGUSR1)
    code, err = end(process, 20)
    assert code == DRAINED and "stopped by SIGUSR1" in err, err


@pytest.mark.parametrize("layout", ["replicas", "split"])
def test_an_error_on_one_rank_names_rank_host_and_cause(hpcdecode, long_job, layout):
    two = hpcdecode.line(*long_job, "--layout", layout, ranks=2)
    odd = ["-n", "1", "env", "HPCDECODE_ISA=none-such", *two[len(launcher(2)) :]]
    process = hpcdecode.launch([*two, ":", *odd])
    code, err = end(process, 60)
    assert code != 0
    assert f"rank 2 on {os.uname().nodename}" in err and "none-such" in err


@pytest.mark.parametrize(
    ("layout", "rank"),
    [("split", 0), ("split", 2), pytest.param("replicas", 0, marks=pytest.mark.full), ("replicas", 2)],
)
def test_a_killed_rank_ends_the_others(hpcdecode, long_job, tmp_path, layout, rank):
    process = hpcdecode.start(*long_job, "--layout", layout, ranks=3)
    wait_for_rows(tmp_path / "out.h5", process)
    mapped = Path(f"/proc/{rank_of(process, rank).pid}/maps").read_text()
    rank_of(process, rank).kill()
    code, _ = end(process, 20)
    assert code != 0
    segments = [line for line in mapped.splitlines() if "/dev/shm/mpich_" in line]
    assert OPEN_MPI or (segments and all(line.endswith("(deleted)") for line in segments)), "memory is left"
    rows, complete = finished(tmp_path / "out.h5")
    assert rows and not complete


@pytest.mark.parametrize("rank", [0, *(pytest.param(rank, marks=pytest.mark.full) for rank in (1, 2, 3))])
def test_a_rank_that_hangs_is_named_with_what_it_was_doing(hpcdecode, long_job, tmp_path, rank):
    """Of the lead, another S-rank, and R-ranks."""
    process = hpcdecode.start(*long_job, "--s-ranks", 2, "--stall-timeout", 5, ranks=4)
    wait_for_rows(tmp_path / "out.h5", process)
    rank_of(process, rank).send_signal(signal.SIGSTOP)
    code, err = end(process, 5 + 10)
    (said,) = [line for line in err.splitlines() if "stalled" in line]
    assert code != 0 and f"rank {rank} on {os.uname().nodename} stalled: no sign of life for " in said
    assert any(f" s, in {operation} ({what})" in said for operation, what in OPERATIONS.items())
    rows, complete = finished(tmp_path / "out.h5")
    assert rows and not complete


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_file_that_never_answers_is_named(hpcdecode, tmp_path, ranks):
    """A pipe that nobody writes to: the lead hangs in it, and the others rightly wait."""
    os.mkfifo(tmp_path / "prompts.jsonl")
    process = hpcdecode.start("generate", "prompts.jsonl", "--model", "demo", "--stall-timeout", 5, ranks=ranks)
    code, err = end(process, 60)
    assert code != 0 and err.count("stalled") == 1
    assert f"rank 0 on {os.uname().nodename} stalled: no progress for " in err and " s, in load (" in err
