"""Steady decoding for half an hour, or HPCDECODE_SOAK_SECONDS: no hang, no growth, the tokens of a serial run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from statistics import median

import psutil
import pytest

import hpcdecode as package

SECONDS = float(os.environ.get("HPCDECODE_SOAK_SECONDS", "1800"))
COMPARED = 60  # rows
STALL = 60  # seconds without a finished row
GROWTH = 1.05  # of a rank's memory, from the second quarter of the time to the last


def rows(count):
    """Random prompts of random lengths; stop tokens end many of them early."""
    draw = random.Random(11)
    for _ in range(count):
        ids = [draw.randrange(5, 400) for _ in range(draw.randint(1, 200))]
        stops = draw.sample(range(5, 400), 12)
        yield {"prompt_token_ids": ids, "max_tokens": draw.randint(1, 160), "stop_token_ids": stops}


def resident(ranks):
    return {rank.environ()["PMI_RANK"]: rank.memory_info().rss for rank in ranks}


def job(name):
    flags = ("--model", "demo", "-o", f"{name}.h5", "--ignore-eos", "--dtype", "float32", "--batch", 48, "--overlap", 2)
    return ("generate", f"{name}.jsonl", *flags)


@pytest.mark.full
@pytest.mark.parametrize("flags", [("--s-ranks", 1), ("--layout", "replicas")], ids=["split", "replicas"])
def test_half_an_hour_of_decoding(hpcdecode, tmp_path, flags):
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(int(100 * SECONDS))))
    process = hpcdecode.start(*job("long"), *flags, ranks=4)
    begin = progress = time.monotonic()
    memory, finished = [], 0
    while time.monotonic() - begin < SECONDS:
        time.sleep(2)
        assert process.poll() is None, process.communicate()
        if not (tmp_path / "long.h5").exists():
            continue
        with package.read(tmp_path / "long.h5") as results:
            if len(results) > finished:
                finished, progress = len(results), time.monotonic()
        assert time.monotonic() - progress < STALL, "no row was finished"
        children = psutil.Process(process.pid).children(recursive=True)
        memory.append(resident(c for c in children if "PMI_RANK" in c.environ() and "hpcdecode" in c.cmdline()))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    quarter = len(memory) // 4
    for rank in memory[-1]:
        early, late = (
            int(median(m[rank] for m in part)) for part in (memory[quarter : 2 * quarter], memory[-quarter:])
        )
        print(f"rank {rank}: {early >> 20} MiB, then {late >> 20} MiB")
        assert late < GROWTH * early, f"rank {rank}: {early >> 20} MiB became {late >> 20}"
    compare_with_serial(hpcdecode, tmp_path)


def compare_with_serial(hpcdecode, tmp_path):
    lines = (tmp_path / "long.jsonl").read_text().splitlines()
    with package.read(tmp_path / "long.h5") as results:
        found = {row["line"]: row["token_ids"].tolist() for row in results}
    chosen = sorted(random.Random(5).sample(sorted(found), min(COMPARED, len(found))))
    (tmp_path / "serial.jsonl").write_text("".join(lines[line - 1] + "\n" for line in chosen))
    result = hpcdecode(*job("serial"))
    assert result.returncode == 0, result.stderr
    with package.read(tmp_path / "serial.h5") as results:
        serial = [row["token_ids"].tolist() for row in results]
    print(f"{len(found)} rows finished, {len(chosen)} compared")
    assert [found[line] for line in chosen] == serial
