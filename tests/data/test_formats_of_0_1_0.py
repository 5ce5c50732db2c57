"""Results, an interrupted job and a kept trace, made by hpcdecode 0.1.0 before its modules moved, are still usable.

`files/formats_of_0_1_0.tar.gz` holds, of the job `generate rows.jsonl --model demo` with the flags below:

- `complete.h5`, and its exports as JSON Lines and as the output of an OpenAI batch;
- `interrupted.h5` and `interrupted.h5.parts/`, as SIGKILL left them: four segments, four sequences in flight;
- `cache/`: the trace of the shipped model and the places of its weights, as they lie in HPCDECODE_CACHE.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import hpcdecode as package
from hpcdecode.data.results.export import export
from hpcdecode.data.results.show import show
from hpcdecode.model import load_split
from hpcdecode.model.frontend import cache
from hpcdecode.system.model_path import demo_directory
from tests.support.steps import Attention, step

ARCHIVE = Path(__file__).parent / "files/formats_of_0_1_0.tar.gz"
FLAGS = ("rows.jsonl", "--model", "demo", "--kv-memory", "64M", "--batch", "4")
FLAGS += ("--dtype", "float32", "--kv-dtype", "float32")
DONE = {1: 1, 2: 3, 3: 1, 5: 1, 6: 2}  # samples of the lines that were committed before the interruption
LEFT = {7: 1, 8: 2, 9: 1}
REFUSED = {"line": 4, "id": "refused", "reason": "prompt: expected a string, got an integer 5"}
TIMES = ("queued_at", "first_token_at", "finished_at")


@pytest.fixture(autouse=True)
def files(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def samples_by_line(results):
    lines = results.column("line").tolist()
    return {line: lines.count(line) for line in lines}


def test_complete_results_are_read(files):
    with package.read(files / "complete.h5") as results:
        assert results.complete and results.errors() == [REFUSED]
        assert samples_by_line(results) == DONE | LEFT
        assert results.attributes["versions"]["hpcdecode"] == "0.1.0"
        row = results.by_id("logprobs")
        assert row["text"].strip() and row["finish_reason"] == "length" and len(row["token_ids"]) == 12
        assert row["top_logprobs"].shape == (12, 2) and row["cumulative_logprob"] < 0
        assert row["prompt_logprobs"].shape == (row["prompt_tokens"],)
        assert results.by_id("greedy")["logprobs"] is None
    assert next(show(str(files / "complete.h5"))).endswith("12 rows, 1 errors, complete")


@pytest.mark.parametrize("kind, name", [("jsonl", "results.jsonl"), ("openai-batch", "batch.jsonl")])
def test_exports_are_those_of_0_1_0(files, kind, name):
    out = export(str(files / "complete.h5"), str(files / "again"), kind)
    assert out.read_bytes() == (files / f"complete.{name}").read_bytes()


def test_rows_of_an_interrupted_job_are_read(files):
    with package.read(files / "interrupted.h5") as results, package.read(files / "complete.h5") as complete:
        assert not results.complete and len(results.sources) == 4
        assert samples_by_line(results) == DONE and results.errors() == [REFUSED]
        assert_same_rows(results, complete)


@pytest.mark.system
def test_an_interrupted_job_goes_on_with_the_same_tokens(files, hpcdecode):
    result = hpcdecode("generate", *FLAGS, "-o", "interrupted.h5")
    assert result.returncode == 3, result.stderr  # all rows done, one refused
    assert "cannot be used" not in result.stderr and "generated again" not in result.stderr
    assert not (files / "interrupted.h5.parts").exists()
    with package.read(files / "interrupted.h5") as results, package.read(files / "complete.h5") as complete:
        assert results.complete and results.errors() == [REFUSED]
        assert samples_by_line(results) == DONE | LEFT
        assert_same_rows(results, complete)
        generated = results.attributes["summary"]["generated_tokens"]
        assert 0 < generated < sum(len(row["token_ids"]) for row in results if row["line"] in LEFT)


@pytest.mark.system
def test_a_complete_job_has_nothing_left_to_do(files, hpcdecode):
    result = hpcdecode("generate", *FLAGS, "-o", "complete.h5")
    assert result.returncode == 3 and "complete already, 12 rows, 1 errors" in result.stdout + result.stderr


def assert_same_rows(results, expected):
    """The rows of `results` are those of `expected`, but for their times and the rounding of log-probabilities."""
    for row in results:
        other = expected.samples(int(row["line"]))[int(row["sample"])]
        for name in row.keys() - set(TIMES):
            if isinstance(row[name], float) or getattr(row[name], "dtype", None) == np.float32:
                np.testing.assert_allclose(row[name], other[name], atol=1e-3, err_msg=name)
            else:
                assert np.array_equal(row[name], other[name]), name


def test_a_kept_trace_gives_the_same_logits(files, monkeypatch):
    """A later version looks for a trace under another name, so this one is put under the name that is looked for."""
    model, tokens = demo_directory() / "model", [(0, position, position + 2) for position in range(9)]
    monkeypatch.setenv("HPCDECODE_CACHE", str(files / "new"))
    made = load_split(model, dtype="float32")
    names = {file.suffix: file for file in (files / "new").iterdir()}
    assert sorted(names) == [".sources", ".trace"]
    for suffix, file in names.items():
        shutil.copy(files / f"cache/demo{suffix}", file)
    for name in ("read_config", "trace", "find_sources"):
        monkeypatch.setattr(cache, name, None)  # from here on they must not be called
    kept = load_split(model, dtype="float32")
    assert torch.equal(*(step(m, Attention(m), tokens, [3, 8]) for m in (made, kept)))
