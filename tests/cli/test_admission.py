"""`generate --admission optimistic`: the results of `reserve`, with rows preempted or in tiers, and after a kill."""

from __future__ import annotations

import json
import signal
import time

import h5py
import pytest

from tests.support.worlds import contents

SHORT, LONG = 60, 24
NEW = 110  # max_tokens of every row
ENDS = list(range(2, 2048, 4))  # tokens that end the short rows, a quarter of the vocabulary
KV = 8 * 192 * 3840  # bytes: eight rows of at most three blocks, in float32
FLAGS = ("--model", "demo", "--dtype", "float32", "--kv-memory", KV, "--max-tokens", NEW, "--ignore-eos")


@pytest.fixture
def prompts(hpcdecode):
    """Rows that end soon, and then rows that take all they may: the room that was expected runs out."""
    rows = []
    for line in range(SHORT + LONG):
        row = {"prompt_token_ids": [5 + (line * 7 + i) % 900 for i in range(20)], "seed": line, "temperature": 1.0}
        row |= {"stop_token_ids": ENDS} if line < SHORT else {}
        row |= {"n": 3} if line % 20 == 3 else {}
        row |= {"logprobs": 1} if line % 7 == 0 else {}
        rows.append(row)
    (hpcdecode.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = hpcdecode("generate", "rows.jsonl", "-o", "reserve.h5", *FLAGS)
    assert result.returncode == 0, result.stderr
    return contents(hpcdecode.directory / "reserve.h5")


def columns(path):
    with h5py.File(path) as file:
        return {name: data[:].tolist() for name, data in file["rows"].items() if not name.endswith("_at")}


def rows_of(path):
    with h5py.File(path) as file:
        return len(file["rows/line"])


@pytest.mark.parametrize("where", [(), ("--layout", "split", "--partition", "head")])
def test_preempted_rows_have_the_results_of_reserved_ones(hpcdecode, prompts, where):
    ranks, kv_memory = (4, KV // 3) if where else (1, KV)  # the demo model has three KV heads
    flags = (*FLAGS, "--kv-memory", kv_memory, *where, "--admission", "optimistic")
    result = hpcdecode("generate", "rows.jsonl", "-o", "out.h5", *flags, ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert "admission optimistic" in result.stderr
    summary = contents(hpcdecode.directory / "out.h5")[-1]
    assert summary["preemptions"] > 0 and summary["preempted_tokens"] > summary["preemptions"]
    assert f"preempted {summary['preemptions']:,} times" in result.stderr
    reserved, optimistic = (columns(hpcdecode.directory / f"{name}.h5") for name in ("reserve", "out"))
    assert str(reserved) == str(optimistic)  # NaN equals NaN


@pytest.mark.parametrize("where", [(), ("--layout", "split", "--partition", "head")])
def test_rows_that_leave_for_a_tier_have_the_results_of_reserved_ones(hpcdecode, prompts, where):
    ranks, kv_memory = (4, KV // 3) if where else (1, KV)
    flags = (*FLAGS, "--kv-memory", kv_memory, *where, "--admission", "optimistic", "--kv-swap", "host:1G")
    result = hpcdecode("generate", "rows.jsonl", "-o", "out.h5", *flags, "--kv-swap", "nvme:.:1G", ranks=ranks)
    assert result.returncode == 0, result.stderr
    summary = contents(hpcdecode.directory / "out.h5")[-1]
    assert 0 < summary["swapped"] <= summary["preemptions"] and summary["swap_failures"] == 0
    assert summary["swapped_tokens"] > 20 * summary["swapped"]
    assert summary["swap_in_bytes"] == summary["swap_out_bytes"] > 0
    assert f"{summary['swapped']:,} times to tiers" in result.stderr
    reserved, swapped = (columns(hpcdecode.directory / f"{name}.h5") for name in ("reserve", "out"))
    assert str(reserved) == str(swapped)


def test_a_job_that_is_killed_while_rows_wait_goes_on(hpcdecode, prompts):
    swap = ("--kv-swap", "nvme:.:1G")
    flags = (*FLAGS, "--admission", "optimistic", *swap, "--checkpoint-every", 0.1)
    process = hpcdecode.start("generate", "rows.jsonl", "-o", "out.h5", *flags)
    out, end = hpcdecode.directory / "out.h5", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        if out.exists() and rows_of(out) > SHORT:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not list(hpcdecode.directory.glob(".hpcdecode-kv-*"))
    result = hpcdecode("generate", "rows.jsonl", "-o", "out.h5", *flags)
    assert result.returncode == 0, result.stderr
    assert str(columns(hpcdecode.directory / "reserve.h5")) == str(columns(out))


def test_a_simulation_says_what_optimistic_admission_brings(hpcdecode):
    sizes = ("--rows", 300, "--mean", 40, 60, "--max-tokens", 400, "--kv-memory", "40M", "--batch", 64, "--lanes", 1)
    figures = []
    for admission in ("reserve", "optimistic"):
        flags = ("--model", "demo", *sizes, "--admission", admission, "--json")
        result = hpcdecode("simulate", *flags)
        assert result.returncode == 0, result.stderr
        figures.append(json.loads(result.stdout))
    assert figures[0]["generated_tokens"] == figures[1]["generated_tokens"]
    assert figures[0]["preemptions"] == 0
    assert figures[1]["steps"] < 0.8 * figures[0]["steps"]
    result = hpcdecode("simulate", "--model", "demo", "--schedule", "vllm", "--admission", "optimistic")
    assert result.returncode == 2 and "--admission" in result.stderr


@pytest.mark.parametrize(
    ("tier", "problem"),
    [
        ("nvme:none:1G", "expected a directory to write to on every host with R-ranks, got: No such file"),
        ("host:900T", "the memory of this host, got"),
        ("host:1K", "expected tiers of at least"),
    ],
)
def test_a_tier_that_cannot_be_used_is_refused(hpcdecode, tier, problem):
    flags = ("--model", "demo", "--admission", "optimistic", "--kv-swap", tier)
    result = hpcdecode("generate", "-p", "Hello", "-o", "out.h5", *flags)
    assert result.returncode == 2 and problem in result.stderr and "Traceback" not in result.stderr
