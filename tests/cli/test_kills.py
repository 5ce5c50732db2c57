"""kill -9 of all ranks at random moments: the same command goes on, every row is there once, with the same tokens."""

from __future__ import annotations

import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path

import h5py
import msgspec
import psutil
import pytest

from hpcdecode.data.results.seal import unsealed
from hpcdecode.data.results.segments import parts_folder, segments_in
from hpcdecode.data.results.unfinished import UNFINISHED
from hpcdecode.generate import ROW_ERRORS
from tests.support.commands import ROOT, rank_of, ranks_of
from tests.support.counted_jobs import CountedJobs

DEMO = ROOT / "jobs" / "demo" / "prompts.jsonl"
BROKEN = 78  # line
GONE = 10  # seconds until a job has ended of which a rank was killed


class Kills:
    """A job that is killed again and again. repeated: tokens that each kill made the next run generate again."""

    def __init__(self, command, folder: Path, arguments):
        self.arguments, self.out = arguments, folder / "out.h5"
        self.jobs = CountedJobs(command, folder / "counts")
        self.repeated: list[int] = []

    def kill(self, ranks: int, tokens: int, flags=(), *, rank: int | None = None, seconds: float = 0) -> None:
        """Start the command, kill it once it has generated so many tokens, and look at its file.

        Tokens, not seconds: a fast machine would be done before.

        Args:
            ranks: Of the job.
            tokens: To wait for, in this run.
            flags: Of the command, beside those of the job.
            rank: The one that is killed, and has to take all others along; None kills all.
            seconds: To wait in place of tokens, from the start.
        """
        before = self.durable()
        process = self.jobs.start(*self.arguments, *flags, "-o", self.out, ranks=ranks, tokens=0 if seconds else tokens)
        time.sleep(seconds)
        assert process.poll() is None, process.communicate()
        _kill_all(process) if rank is None else _kill_one(process, rank)
        self.repeated.append(before + self.jobs.tokens() - self.durable())

    def durable(self) -> int:
        """Generated tokens on disk; the file opens with plain h5py, and no row is in it twice."""
        if not self.out.exists():
            return 0
        _, errors, complete = contents(self.out)
        assert not complete and errors in ([], [BROKEN])
        parts = parts_folder(self.out)
        rows = {}  # the index may be older than the segments
        for segment in segments_in(parts):
            rows |= contents(parts / segment.name)[0]
        left = parts / UNFINISHED
        in_flight = msgspec.msgpack.decode(unsealed(left)[0]) if left.exists() else []
        newest = {(line, sample): ids for line, sample, ids, *_ in in_flight if line not in rows}
        return sum(map(len, rows.values())) + sum(map(len, newest.values()))


def _kill_all(process) -> None:
    """The launcher and all ranks, at once."""
    family = [*ranks_of(process), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family[:-1], timeout=20)
    assert not alive


def _kill_one(process, rank) -> None:
    others = ranks_of(process)
    rank_of(process, rank).kill()
    end = time.monotonic() + GONE
    process.communicate(timeout=GONE)
    assert process.returncode != 0
    _, alive = psutil.wait_procs(others, timeout=max(end - time.monotonic(), 0.1))
    assert not alive


def contents(path):
    """Token ids by line, lines of errors, and whether the file is complete."""
    with h5py.File(path) as file:
        ends, tokens = file["rows/token_offsets"][:], file["rows/token_ids"][:]
        ends -= ends[0]  # a segment's begin where the one before ends
        lines = file["rows/line"][:].tolist()
        assert len(lines) == len(set(lines))
        rows = {line: tokens[a:b].tolist() for line, (a, b) in zip(lines, pairwise(ends), strict=True)}
        return rows, file["errors/line"][:].tolist(), bool(file.attrs.get("complete"))


@pytest.fixture
def job(tmp_path):
    """A job of demo rows, each the beginning of one of the demo's prompts: its arguments."""

    def make(rows: int, tokens: int, checkpoint_every: float):
        texts = [json.loads(line)["prompt"] for line in DEMO.read_text(encoding="utf-8").splitlines()]
        with open(tmp_path / "prompts.jsonl", "w") as file:
            for row in range(rows):
                words = texts[row % len(texts)].split(" ")
                prompt = " ".join(words[: 4 + row // len(texts) % 30])
                fields = {"max_tokens": tokens // 2 + row * 37 % tokens}
                if row % 4 == 0:
                    fields |= {"temperature": 0.8, "seed": row}
                file.write(json.dumps({"prompt": prompt, **fields}) + "\n" if row + 1 != BROKEN else "{broken\n")
        flags = ("--model", "demo", "--ignore-eos", "--dtype", "float32", "--batch", 64, "--kv-memory", "256M")
        return ("generate", "prompts.jsonl", *flags, "--checkpoint-every", checkpoint_every)

    return make


def finish_and_compare(hpcdecode, job, kills, tmp_path, rows):
    last = hpcdecode(*job, "-o", kills.out, timeout=1200)
    assert last.returncode == ROW_ERRORS, last.stderr
    whole = hpcdecode(*job, "-o", "whole.h5", timeout=1200)
    assert whole.returncode == ROW_ERRORS, whole.stderr
    made, expected = contents(kills.out), contents(tmp_path / "whole.h5")
    assert list(made[0]) == [n for n in range(1, rows + 1) if n != BROKEN] and made[1:] == ([BROKEN], True)
    assert [line for line in expected[0] if made[0][line] != expected[0][line]] == []
    assert not parts_folder(kills.out).exists()
    return sum(map(len, expected[0].values()))


def test_five_kills(hpcdecode, job, tmp_path):
    arguments = job(400, 40, 0.1)
    kills, draw = Kills(hpcdecode, tmp_path, arguments), random.Random(1)
    for ranks, flags in ((1, ()), (3, ()), (4, ("--s-ranks", 2)), (3, ("--layout", "split"))):
        kills.kill(ranks, draw.randint(1, 1500), flags)
    kills.kill(1, 0, seconds=draw.uniform(0.1, 3))
    assert kills.durable() > 0
    finish_and_compare(hpcdecode, arguments, kills, tmp_path, 400)
    assert min(kills.repeated) >= 0


@pytest.mark.full
def test_sixty_kills_of_2000_rows(hpcdecode, job, tmp_path):
    """A kill repeats the tokens since the last checkpoint: in the median at most 2 % of those of the whole job."""
    arguments = job(2000, 80, 0.2)
    kills, draw = Kills(hpcdecode, tmp_path, arguments), random.Random(2)
    for number in range(60):
        in_start = draw.uniform(0.1, 4) if number % 10 == 9 else 0
        kills.kill((1, 3)[number % 2], draw.randint(1, 3500), seconds=in_start)
    whole = finish_and_compare(hpcdecode, arguments, kills, tmp_path, 2000)
    shares = sorted(repeated / whole for repeated in kills.repeated)
    print(f"repeated a kill: median {statistics.median(shares):.2%}, most {shares[-1]:.2%} of {whole:,} tokens")
    assert min(shares) >= 0 and statistics.median(shares) <= 0.02


@pytest.mark.full
def test_twenty_kills_of_each_role(hpcdecode, job, tmp_path):
    """Of the lead, another S-rank and an R-rank, at random moments: the others end within seconds, nothing is lost."""
    arguments = job(2000, 80, 0.2)
    kills, draw = Kills(hpcdecode, tmp_path, arguments), random.Random(3)
    for number in range(60):
        in_start = draw.uniform(0.5, 4) if number % 10 == 9 else 0
        kills.kill(4, draw.randint(1, 3500), ("--s-ranks", 2), rank=number % 3, seconds=in_start)
    finish_and_compare(hpcdecode, arguments, kills, tmp_path, 2000)
    assert min(kills.repeated) >= 0
