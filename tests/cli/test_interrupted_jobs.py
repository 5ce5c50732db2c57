"""A job that was interrupted, by whatever means, goes on with the same command and loses or repeats no row."""

from __future__ import annotations

import json
import re
import signal
import time
from itertools import pairwise
from pathlib import Path

import h5py
import msgspec
import pytest

from hpcdecode.data.results.seal import unsealed
from hpcdecode.system.signals import DRAINED

ROWS = 150
SEQUENCES = [line for line in range(1, ROWS + 1) if line != 78 for _ in range(3 if line % 10 == 1 else 1)]


@pytest.fixture
def job(hpcdecode, checkpoint, tmp_path):
    rows = [{"prompt_token_ids": [5 + i % 400] * 4, "max_tokens": 20 + i * 37 % 200} for i in range(ROWS)]
    for row in rows[::10]:
        row |= {"n": 3, "temperature": 1.0}
    lines = [json.dumps(row) for row in rows]
    lines[77] = "{broken"
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = ("--model", checkpoint("llama3"), "--ignore-eos", "--dtype", "float32", "--batch", 32)
    return ("generate", "prompts.jsonl", *flags, "--checkpoint-every", 0.2)


def contents(path):
    with h5py.File(path) as file:
        ends, tokens = file["rows/token_offsets"][:], file["rows/token_ids"][:]
        rows = [tokens[a:b].tolist() for a, b in pairwise(ends)]
        return file["rows/line"][:].tolist(), rows, file["errors/line"][:].tolist(), bool(file.attrs["complete"])


def run_until(process, path, rows):
    """Wait until the output holds so many rows, or the job ends."""
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        if path.exists() and len(contents(path)[0]) >= rows:
            return
        time.sleep(0.05)


def test_a_signal_keeps_the_tokens_in_flight(hpcdecode, job, tmp_path):
    out = tmp_path / "out.h5"
    process = hpcdecode.start(*job, "-o", out)
    run_until(process, out, 10)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "the same command goes on" in err
    in_flight = msgspec.msgpack.decode(unsealed(tmp_path / "out.h5.parts" / "unfinished.msgpack")[0])
    first = sum(map(len, contents(out)[1])) + sum(len(tokens) for _line, _sample, tokens, *_ in in_flight)
    assert len(in_flight) > 1
    changed = hpcdecode(*job, "-o", out, "--temperature", 1)
    assert changed.returncode == 2 and "sampling.temperature was 0.0 and is 1.0" in changed.stderr
    assert hpcdecode(*job, "-o", out).returncode == 3
    with h5py.File(out) as file:
        second = json.loads(file.attrs["summary"])["generated_tokens"]
        assert first + second == len(file["rows/token_ids"])  # nothing was generated twice


def test_a_signal_before_anything_is_loaded_drains_the_job(hpcdecode, job):
    process = hpcdecode.start(*job)
    end = time.monotonic() + 60
    while True:
        loaded = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
        if catches(process.pid, signal.SIGUSR1):
            break
        assert not loaded and process.poll() is None and time.monotonic() < end
        time.sleep(1e-3)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == DRAINED and "stopped by SIGUSR1" in err


def catches(process, number):
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())[1]
    return int(caught, 16) >> (number - 1) & 1


def test_fail_fast_keeps_what_is_done(hpcdecode, job, tmp_path):
    stopped = hpcdecode(*job, "--fail-fast")
    assert stopped.returncode == 2 and "line 78: expected a JSON object" in stopped.stderr
    whole = hpcdecode(*job, "--max-errors", 1, "--limit", 100)
    assert whole.returncode == 3, whole.stderr
    assert contents(tmp_path / "prompts.h5")[0] == [line for line in SEQUENCES if line <= 100]


def test_a_job_goes_on_with_its_recurrent_states_in_the_same_data_type_only(hpcdecode, checkpoint, tmp_path):
    rows = [json.dumps({"prompt_token_ids": [5 + i] * 4, "max_tokens": 3}) for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    job = ("generate", "prompts.jsonl", "--model", checkpoint("mamba2"), "--dtype", "float32", "--ignore-eos")
    narrow, wide = (("--mamba-ssm-cache-dtype", dtype) for dtype in ("bfloat16", "float32"))
    for begun, other, said in (
        (narrow, wide, "was 'bfloat16' and is None"),
        (wide, narrow, "was None and is 'bfloat16'"),
    ):
        first = hpcdecode(*job, *begun, "--limit", 1, "--overwrite")
        assert first.returncode == 0, first.stderr
        before = contents(tmp_path / "prompts.h5")
        refused = hpcdecode(*job, *other)
        assert refused.returncode == 2 and f"mamba_ssm_cache_dtype {said}" in refused.stderr, refused.stderr
        assert contents(tmp_path / "prompts.h5") == before
        rest = hpcdecode(*job, *begun)
        assert rest.returncode == 0 and len(contents(tmp_path / "prompts.h5")[0]) == 3, rest.stderr
