"""`generate --schedule fluid`: the results of a KV cache in memory, after kills and faults of tiers, too."""

from __future__ import annotations

import json
import random
import signal

import h5py
import pytest

from tests.support.counted_jobs import CountedJobs
from tests.support.worlds import contents

ROWS = 40
NEW = 60  # max_tokens of every row
KV = 8 * 128 * 3840  # bytes: eight rows, in float32
FLAGS = ("--model", "demo", "--dtype", "float32", "--max-tokens", NEW, "--ignore-eos")
FLUID = (*FLAGS, "--schedule", "fluid", "--kv-memory", KV)
TIERS = {"host": f"host:{5 * KV}", "file": f"nvme:.:{5 * KV}"}


@pytest.fixture
def prompts(hpcdecode):
    """Rows, some of them of several samples, and the results that they have with all K and V in memory."""
    rows = []
    for line in range(ROWS):
        row = {"prompt_token_ids": [5 + (line * 7 + i) % 900 for i in range(40)], "seed": line, "temperature": 1.0}
        row |= {"n": 3} if line % 10 == 3 else {}
        row |= {"logprobs": 1} if line % 7 == 0 else {}
        rows.append(row)
    (hpcdecode.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = hpcdecode("generate", "rows.jsonl", "-o", "plain.h5", *FLAGS)
    assert result.returncode == 0, result.stderr
    return columns(hpcdecode.directory / "plain.h5")


def columns(path):
    with h5py.File(path) as file:
        return str({name: data[:].tolist() for name, data in file["rows"].items() if not name.endswith("_at")})


@pytest.mark.parametrize(
    ("ranks", "tier", "where"),
    [
        (1, "file", ()),
        pytest.param(2, "host", ("--s-ranks", 1), marks=pytest.mark.full),
        (3, "file", ("--s-ranks", 1, "--admission", "optimistic")),
        (4, "file", ("--s-ranks", 1, "--partition", "head", "--kv-memory", KV // 3)),  # the model has three KV heads
    ],
)
def test_rows_have_the_results_of_a_cache_in_memory(hpcdecode, prompts, ranks, tier, where):
    flags = (*FLUID, *where, "--kv-swap", TIERS[tier])
    result = hpcdecode("generate", "rows.jsonl", "-o", "out.h5", *flags, ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert "rotation of groups:" in result.stderr and "schedule fluid" in result.stderr
    summary = contents(hpcdecode.directory / "out.h5")[-1]
    assert summary["swap_in_bytes"] > 0 and summary["swap_out_bytes"] > 0
    assert columns(hpcdecode.directory / "out.h5") == prompts


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.full)])
def test_a_job_that_is_killed_again_and_again_goes_on(hpcdecode, prompts, kills):
    flags = (*FLUID, "--kv-swap", TIERS["file"], "--checkpoint-every", 0.05)
    out, draw = hpcdecode.directory / "out.h5", random.Random(kills)
    jobs = CountedJobs(hpcdecode, hpcdecode.directory / "counts")
    for _ in range(kills):
        tokens = draw.randint(1, ROWS * NEW // kills)  # all runs together end before the job does
        process = jobs.start("generate", "rows.jsonl", "-o", "out.h5", *flags, tokens=tokens)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert not list(hpcdecode.directory.glob(".hpcdecode-kv-*"))
    result = hpcdecode("generate", "rows.jsonl", "-o", "out.h5", *flags)
    assert result.returncode == 0, result.stderr
    assert columns(out) == prompts


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "--schedule fluid: expected --kv-swap"),
        (("--kv-swap", "host:1M"), "expected --kv-swap of more than 1.25 times --kv-memory"),
        (("--kv-swap", "nvme:none:1G"), "expected a directory to write to"),
        (("--kv-swap", "host:64M", "--kv-memory", "64K"), "expected --kv-memory of at least"),
    ],
)
def test_what_cannot_rotate_is_refused(hpcdecode, flags, problem):
    (hpcdecode.directory / "rows.jsonl").write_text('{"prompt": "a"}\n')
    result = hpcdecode("generate", "rows.jsonl", "-o", "out.h5", *FLUID, *flags)
    assert result.returncode == 2 and problem in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
