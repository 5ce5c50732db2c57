"""The output across real kills, full disks and long jobs, each in a process of its own."""

import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PRELUDE = """
import itertools, resource, sys
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.writer import Result, ResultsWriter
from hpcdecode.errors import UserError

def result(line):
    return Result(line, f"row-{line}", 0, f"täxt {line} " * 8, "stop", 3, list(range(line % 30)))
"""


def start(code, *arguments):
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def check_rows(path):
    """Number of rows; every one of them, and nothing else, must be as `result` makes it."""
    with h5py.File(path, "r") as file:
        rows = file["rows"]
        lines, offsets, ids = rows["line"][:], rows["token_offsets"][:], rows["token_ids"][:]
        texts = rows["text"].asstr()[:]
    assert len(set(lines.tolist())) == len(lines)
    assert np.array_equal(np.diff(offsets), lines % 30)
    for line, text, a, b in zip(lines, texts, offsets, offsets[1:], strict=False):
        assert text == f"täxt {line} " * 8 and ids[a:b].tolist() == list(range(line % 30))
    return len(lines)


@pytest.mark.parametrize("attempt", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 20))])
def test_kill_9_leaves_a_file_with_every_committed_row(tmp_path, attempt):
    path = tmp_path / "out.h5"
    writing = """
        out = ResultsWriter(sys.argv[1], attributes={}, segment_rows=50, checkpoint_seconds=0.01)
        for line in itertools.count(1):
            out.add(result(line))
            if line % 70 == 0:
                out.checkpoint()
                print(line, flush=True)
    """
    process = start(writing, path)
    first = process.stdout.readline()
    deadline, looks = time.monotonic() + 0.2 + random.Random(attempt).random(), 0
    while time.monotonic() < deadline:
        check_rows(path)
        looks += 1
    process.send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    committed = int((first + printed).split()[-1])
    assert committed > 0 and looks > 0
    assert check_rows(path) >= committed


def test_kill_9_during_the_final_merge(tmp_path):
    path = tmp_path / "out.h5"
    writing = """
        import hpcdecode.data.results.writer as results
        out = ResultsWriter(sys.argv[1], attributes={}, segment_rows=50)
        for line in range(1, 1001):
            out.add(result(line))
        merge = results.merge
        def merge_and_die(*arguments):
            merge(*arguments)
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        results.merge = merge_and_die
        out.checkpoint()
        out.close(complete=True, summary={})
    """
    process = start(writing, path)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert check_rows(path) == 1000
    with h5py.File(path, "r") as file:
        assert not file.attrs["complete"]


@pytest.mark.parametrize("when", ["commit", "merge"])
def test_a_full_disk_is_a_user_error_and_keeps_what_was_committed(tmp_path, when):
    path = tmp_path / "out.h5"
    writing = """
        out = ResultsWriter(sys.argv[1], attributes={}, segment_rows=100)
        for line in range(1, 701):
            out.add(result(line))
        out.checkpoint()
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        try:
            if sys.argv[2] == "commit":
                for line in range(701, 5000):
                    out.add(Result(line, "x", 0, "y" * 5000, "stop", 1, [1]))
            else:
                out.close(complete=True, summary={})
        except UserError as e:
            print(e)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    """
    message = finish(start(writing, path, when))
    assert f"results {path}: writing failed: File too large" in message
    assert check_rows(path) == 700
    assert not list(Path(f"{path}.parts").glob("*.tmp"))


def test_200_000_rows_cost_little_more_memory_than_2_000(tmp_path):
    writing = """
        out = ResultsWriter(sys.argv[1], attributes={})
        for line in range(1, int(sys.argv[2]) + 1):
            out.add(result(line ^ 1023)) if line % 100 else out.error(RowError(line ^ 1023, "e", "bad"))
        out.close(complete=True, summary={})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    """
    few, many = (int(finish(start(writing, tmp_path / f"{n}.h5", n))) for n in (2_000, 200_000))
    assert many - few < 100, (few, many)
    with h5py.File(tmp_path / "200000.h5", "r") as file:
        lines = file["rows/line"][:]
        assert (np.diff(lines) > 0).all() and len(lines) + len(file["errors/line"]) == 200_000
