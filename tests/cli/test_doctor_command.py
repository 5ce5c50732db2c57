"""`hpcdecode doctor`, alone, restricted, and in a world."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.commands import run


def report(result):
    assert "Traceback" not in result.stderr, result.stderr
    found = json.loads(result.stdout)
    assert result.returncode == (0 if found["healthy"] else 1)
    assert found["healthy"] == (not found["problems"])
    assert all(p["finding"] and p["remedy"] for p in found["problems"])
    return found


def test_alone(hpcdecode):
    (rank,) = report(hpcdecode("doctor", "--json"))["ranks"]
    assert rank["cpus"] == sorted(os.sched_getaffinity(0)) and rank["rank"]["role"] == "SR"
    assert all(rate > 0 for rate in rank["memory"]["read_gbps"].values())
    assert set(map(int, rank["memory"]["read_gbps"])) == {1, len(rank["cpus"])}
    shown = hpcdecode("doctor").stdout
    assert "avx2" in shown and "MPI: not used" in shown and ("healthy" in shown or "remedy:" in shown)


def test_a_restricted_process_shows_what_it_was_given(hpcdecode):
    cpu = max(os.sched_getaffinity(0))
    line = ["taskset", "-c", str(cpu), *hpcdecode.line("doctor", "--json")]
    (rank,) = report(run(line, cwd=hpcdecode.directory, env=hpcdecode.environment))["ranks"]
    assert rank["cpus"] == [cpu] and rank["rank"]["threads"] == 1


def test_the_generic_isa_is_a_problem(hpcdecode):
    hpcdecode.environment["HPCDECODE_ISA"] = "generic"
    found = report(hpcdecode("doctor", "--json"))
    assert not found["healthy"] and "ISA" in [p["check"] for p in found["problems"]]


def test_an_isa_that_the_machine_lacks_is_named(hpcdecode):
    hpcdecode.environment["HPCDECODE_ISA"] = "avx1024"
    result = hpcdecode("doctor")
    assert result.returncode == 2 and "avx1024" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_in_a_world_rank_0_speaks_for_all(hpcdecode, ranks):
    found = report(hpcdecode("doctor", "--json", "--layout", "split", ranks=ranks))
    assert [r["rank"]["role"] for r in found["ranks"]] == ["S"] + ["R"] * (ranks - 1)
    assert [r["memory"] is None for r in found["ranks"]] == [True] + [False] * (ranks - 1)
    assert found["exchange"] is None  # one host
    assert all("thread level" in r["mpi"] and r["launcher"] == "mpiexec" for r in found["ranks"])
    if ranks > len(os.sched_getaffinity(0)):
        assert "cores" in [p["check"] for p in found["problems"]]
