"""`bench exchange` and `bench pipeline` verify, measure and print; in a world of 1 they say how to be started."""

from __future__ import annotations

import json
import os

import pytest

from hpcdecode.bench.nodes import Nodes
from hpcdecode.errors import UserError
from hpcdecode.planning.profile import read

EXCHANGE = ("bench", "exchange", "--rows", 5, "--hidden", 1024, "--r-ranks", 1, 2, "--passes", 2, "--all", "--json")
SMALL = ("--model", "tiny", "--batch", 4, "--context", 40, "--steps", 3, "--passes", 2)
PIPELINE = ("bench", "pipeline", *SMALL, "--json")


@pytest.mark.parametrize(("line", "ranks"), [(EXCHANGE, 3), (PIPELINE, 2)])
def test_a_measurement_over_ranks(hpcdecode, tmp_path, line, ranks):
    hpcdecode.environment["XDG_CACHE_HOME"] = str(tmp_path)
    result = hpcdecode(*line, ranks=ranks)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["bench"] == line[1] and found["cases"]
    for case in found["cases"]:
        assert case.keys() == {"case", "value", "unit", "reference", "ratio", "spread"}
    steps = {c["case"]: c["value"] for c in found["cases"] if c["unit"] == "ms"}
    assert all(value > 0 for value in steps.values())


def test_ranks_are_calibrated_side_by_side(hpcdecode, tmp_path, checkpoint):
    """As a split, as replicas, and in groups of two: alone, and beside R-ranks."""
    model = ("--model", checkpoint("qwen3"))
    result = hpcdecode("calibrate", *model, "-o", "profile.json", "--passes", 1, ranks=4)
    assert result.returncode == 0, result.stderr
    profile = read(str(tmp_path / "profile.json"))
    cost = profile.cost
    assert profile.ranks == 4 and 0 <= cost.shared_core_fraction <= 1
    assert cost.attend_seconds_per_cached_token + cost.attend_seconds_per_sequence > 0
    pairs = profile.sums[0]
    assert pairs.members == 2 and pairs.latency_seconds + pairs.seconds_per_token > 0
    assert pairs.replica is not None and min(pairs.replica.slice_seconds) > 0 and pairs.split is not None
    assert pairs.split > 0 and all(each.split is None for each in profile.sums[1:])
    plan = ("plan", *model, "--profile", "profile.json", "--fixed", 20, 33)
    result = hpcdecode(*plan)
    assert result.returncode == 0 and "4 replicas" in result.stdout and " S + " in result.stdout, result.stderr
    assert "of 2 ranks" in result.stdout
    result = hpcdecode(*plan, "--r-ranks", 5)
    assert result.returncode == 2 and "--r-ranks: expected 3, as profile.json was measured on" in result.stderr


def test_guesses_change_no_token_of_their_benchmark(hpcdecode):
    line = ("bench", "guesses", "--model", "demo", "--rows", 2, "--passes", 1, "--max-tokens", 12, "--json")
    result = hpcdecode(*line)
    assert result.returncode == 0, result.stderr
    cases = json.loads(result.stdout)["cases"]
    ways = ("no guesses", "suffix", "ngram", "draft_model in int8")
    assert [c["case"] for c in cases[:4]] == [f"json, 2 rows, {way}" for way in ways]
    assert len(cases) == 12 and cases[0]["ratio"] == 1


@pytest.mark.full
def test_predictions_beside_jobs(hpcdecode, tmp_path):
    hpcdecode.environment["XDG_CACHE_HOME"] = str(tmp_path)
    line = ("bench", "planner", "--set", "truth", "choice", "schedules", "--model", "tiny", "--rounds", 1, "--json")
    result = hpcdecode(*line, "--ranks", 1, 2, timeout=1800)
    assert result.returncode == 0, result.stderr
    cases = json.loads(result.stdout)["cases"]
    assert cases[-1]["case"] == "worst error" and all(case["value"] > 0 for case in cases)
    assert sum("chosen" in case["case"] for case in cases) == 2


def test_tiers_against_a_plain_copy(hpcdecode, tmp_path):
    result = hpcdecode("bench", "swap", "--dir", tmp_path, "--mebibytes", 2, "--passes", 1)
    assert result.returncode == 0 and "a plain copy" in result.stdout and not list(tmp_path.glob(".hpcdecode-kv-*"))
    result = hpcdecode("bench", "swap", "--dir", tmp_path / "none", "--mebibytes", 1)
    assert result.returncode == 2 and "expected a directory that can be written to" in result.stderr


@pytest.mark.parametrize("line", [EXCHANGE, PIPELINE])
def test_one_process_is_refused(hpcdecode, line):
    result = hpcdecode(*line)
    assert result.returncode == 2 and "mpiexec -n" in result.stderr


def test_an_exchange_that_cannot_be_is_refused(hpcdecode):
    """Nodes in a world that is there, and more R-ranks than it has."""
    for flags, ranks, word in (
        (("--nodes", 1), 1, "expected 2 or more"),
        (("--nodes", 3), 2, "got ranks on 1"),
        (("--r-ranks", 2), 2, "expected 1 to 1 in a world of 2"),
    ):
        result = hpcdecode("bench", "exchange", *flags, ranks=ranks)
        assert result.returncode == 2 and word in result.stderr, result.stderr


def test_nodes_are_refused_to_a_process_that_cannot_make_networks(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="as root"):
        Nodes(2)
