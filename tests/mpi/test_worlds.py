"""The command line on the demo model: the same results from any world; `make test-N` chooses its size."""

from __future__ import annotations

import os

import pytest

from tests.support.commands import run
from tests.support.worlds import FLAGS, PROMPTS, contents

RANKS = int(os.environ.get("HPCDECODE_TEST_RANKS", "3"))


def test_one_process_plays_both_roles(alone):
    rows, topology, summary = alone
    assert [rank["role"] for rank in topology] == ["SR"]
    assert len(rows["line"]) == summary["rows"] == 40
    assert rows["line"] == sorted(rows["line"])


@pytest.mark.parametrize("s_ranks", [None, 1, 2])
def test_a_world_makes_the_rows_of_one_process(hpcdecode, tmp_path, alone, s_ranks):
    """As replicas, which is the default, and split."""
    if (s_ranks or 0) >= RANKS:
        pytest.skip(f"{RANKS} ranks leave no R-rank beside {s_ranks} S-ranks")
    flags = ("--s-ranks", s_ranks) if s_ranks else ()
    result = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, *flags, ranks=RANKS)
    assert result.returncode == 0, result.stderr
    rows, topology, summary = contents(tmp_path / "out.h5")
    roles = ["S"] * s_ranks + ["R"] * (RANKS - s_ranks) if s_ranks else ["SR"] * RANKS
    assert [rank["role"] for rank in topology] == roles
    assert rows == alone[0]
    shared = len(os.sched_getaffinity(0)) < RANKS
    assert shared == ("problem: cores" in result.stderr.partition("ready after")[0])
    assert summary["peak_kv_tokens"] > 0 and len(summary["peak_rss_bytes"]) == RANKS


def test_rows_wait_for_room_where_kv_memory_is_tight(hpcdecode, tmp_path, alone):
    result = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, "--kv-memory", "4M", "--layout", "split", ranks=2)
    assert result.returncode == 0, result.stderr
    rows, topology, summary = contents(tmp_path / "out.h5")
    assert rows == alone[0]
    assert summary["peak_kv_tokens"] <= topology[1]["kv_tokens"] < alone[2]["peak_kv_tokens"]


def test_the_model_comes_from_the_environment_and_the_output_from_the_prompts(hpcdecode, tmp_path):
    hpcdecode.environment["HPCDECODE_MODEL"] = "demo"
    (tmp_path / "few.jsonl").write_text('{"prompt": "The with statement"}\n')
    result = hpcdecode("generate", "few.jsonl", "--max-tokens", 4)
    assert result.returncode == 0, result.stderr
    shown = hpcdecode("show", "few.h5")
    assert "1 rows, 0 errors, complete" in shown.stdout and "line 1" in shown.stdout


def test_a_process_alone_needs_no_mpi_library(hpcdecode, tmp_path):
    environment = {**hpcdecode.environment, "MPI4PY_LIBMPI": "/none/libmpi.so"}
    line = hpcdecode.line("generate", PROMPTS, "-o", "out.h5", *FLAGS, "--limit", 2, "--max-tokens", 2)
    result = run(line, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr


def test_split_prints_the_slices(hpcdecode):
    result = hpcdecode("split", "demo")
    assert result.returncode == 0, result.stderr
    assert "6 slices" in result.stdout and "on the wire" in result.stdout
