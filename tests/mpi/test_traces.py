"""`--trace` and `report` on the demo model: a trace that viewers read, whose shares are the wall time."""

from __future__ import annotations

import json
from collections import defaultdict

import h5py
import pytest

from tests.support.commands import Command
from tests.support.worlds import FLAGS, PROMPTS

PNG = b"\x89PNG"


@pytest.fixture(scope="module", params=[1, 3])
def traced(request, tmp_path_factory, forkserver):
    """A command's directory, and the trace of a run of the demo model on 1 and 3 ranks."""
    command = Command(tmp_path_factory.mktemp("traced"), forkserver)
    flags = ("--layout", "split") if request.param > 1 else ()
    result = command("generate", PROMPTS, "-o", "out.h5", *FLAGS, "--trace", "trace.json", *flags, ranks=request.param)
    assert result.returncode == 0, result.stderr
    return command, json.loads((command.directory / "trace.json").read_text())


def spans_by_rank(trace):
    spans = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spans[event["pid"]].append(event)
    return spans


def test_the_spans_of_every_rank_cover_its_time(traced):
    command, trace = traced
    with h5py.File(command.directory / "out.h5") as file:
        summary = json.loads(file.attrs["summary"])
    assert 0 < summary["s_busy"] <= 1 and 0 < summary["r_busy"] <= 1
    accounts = {a["rank"]: a for a in trace["otherData"]["accounts"]}
    spans = spans_by_rank(trace)
    assert spans.keys() == accounts.keys() == set(range(len(summary["peak_rss_bytes"])))
    for rank, own in spans.items():
        ends = [span["ts"] + span["dur"] for span in own]
        assert all(span["ts"] == pytest.approx(end, abs=0.01) for end, span in zip(ends, own[1:], strict=False))
        wall = (ends[-1] - own[0]["ts"]) * 1e-6
        assert sum(accounts[rank]["seconds"].values()) == pytest.approx(wall, rel=0.02)
        assert wall >= summary["seconds"]
        if len(spans) == 1:
            shares = accounts[rank]["seconds"]
            busy = sum(spent for name, spent in shares.items() if name not in ("load", "wait", "append", "attend"))
            assert summary["s_busy"] * summary["seconds"] <= busy
        assert accounts[rank]["seconds"].get("other", 0) < 0.02 * wall


def test_the_clocks_of_the_ranks_agree(traced):
    _, trace = traced
    of = {name: [e for e in trace["traceEvents"] if e["name"] == name] for name in ("post", "slice", "attend")}
    posts, attends = of["post"] or of["slice"], of["attend"]  # fused steps of one process post nothing
    assert posts and attends
    first = min(e["ts"] for e in posts if e["pid"] == 0)
    last = max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["name"] == "take")
    assert all(first <= e["ts"] <= last for e in attends if e["pid"] > 0)


def test_the_load_of_the_r_ranks_is_in_the_trace(traced):
    command, trace = traced
    loads = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    with h5py.File(command.directory / "out.h5") as file:
        peak = json.loads(file.attrs["summary"])["peak_kv_tokens"]
    by_rank = {rank: max(e["args"]["tokens"] for e in loads if e["pid"] == rank) for rank in {e["pid"] for e in loads}}
    assert sum(by_rank.values()) == peak


@pytest.mark.parametrize("name", ["trace.json", "out.h5"])
def test_report_prints_and_draws_the_shares(traced, name):
    pytest.importorskip("matplotlib")
    command, trace = traced
    result = command("report", name, "-o", f"{name}.png")
    assert result.returncode == 0, result.stderr
    assert (command.directory / f"{name}.png").read_bytes().startswith(PNG)
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["rank", "role", "host", "work", "busy", "overhead", "wait", "bubble", "peak", "KV"]
    for line, account in zip(lines[1:], trace["otherData"]["accounts"], strict=False):
        rank, role, _, _, _, *shares = line.split()[:9]
        assert (int(rank), role) == (account["rank"], account["role"])
        assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=0.3)


def test_a_trace_that_cannot_be_written_and_a_file_that_is_none(hpcdecode, tmp_path):
    refused = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, "--trace", "none/such.json")
    assert refused.returncode == 2 and "--trace none/such.json" in refused.stderr
    (tmp_path / "some.json").write_text("[]")
    for name in ("some.json", "missing.json"):
        result = hpcdecode("report", name)
        assert result.returncode == 2 and name in result.stderr and "--trace" in result.stderr
