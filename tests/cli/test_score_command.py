"""`hpcdecode score`: files in, scores out, over one process and several, through interruptions."""

from __future__ import annotations

import json
import os
import signal
import time

import h5py
import numpy as np
import pytest

import hpcdecode as package
from hpcdecode.data.results.segments import parts_folder, segment_files
from hpcdecode.generate import ROW_ERRORS

FLAGS = ("--model", "demo", "--dtype", "float32")
CODE = "def add(a, b):\n    return a + b\n\n\nclass Reader:\n    def read(self):\n        return self.text\n"
ROWS = [
    {"id": "sum", "prompt": "def add(a, b):\n    return ", "continuations": ["a + b", "a - b"], "label": 0},
    {"id": "word", "prompt": "if x ==", "choices": [" 1", " 0"], "label": 1, "logprobs": 2},
    {"id": "text", "text": CODE * 3, "label": None},
    {"id": "bad", "prompt": "a", "choices": ["more than one token"], "label": 3},
    {"id": "one", "prompt": CODE, "continuation": "\n", "label": 4},
]
SCORES = ("line", "sample", "cumulative_logprob", "perplexity", "is_greedy", "is_best", "token_ids", "logprobs")


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "p.jsonl"


def scores(path):
    """The scores of all rows, to the bit."""
    with package.read(path) as results:
        assert results.complete
        return [repr([np.asarray(row[name]).tolist() for name in SCORES]) for row in results]


@pytest.mark.parametrize("layout", ["replicas", "split"])
def test_several_ranks_score_as_one(hpcdecode, prompts, tmp_path, layout):
    for output, flags, ranks in (("1.h5", (), 1), ("3.h5", ("--layout", layout), 3)):
        done = hpcdecode("score", prompts, *FLAGS, *flags, "-o", output, ranks=ranks)
        assert done.returncode == ROW_ERRORS, done.stderr
    assert scores(tmp_path / "3.h5") == scores(tmp_path / "1.h5")
    assert "choices[0]: expected text of one token, got" in done.stderr and " scored and " in done.stderr


def test_results_say_what_was_scored(hpcdecode, prompts, tmp_path):
    assert hpcdecode("score", prompts, *FLAGS, "-o", "o.h5").returncode == ROW_ERRORS
    with package.read(tmp_path / "o.h5") as results:
        rows, errors = list(results), results.errors()
    assert [(r["id"], r["sample"], r["text"], r["label"]) for r in rows] == [
        *(("sum", 0, "a + b", 0), ("sum", 1, "a - b", 0), ("word", 0, " 1", 1), ("word", 1, " 0", 1)),
        *(("text", 0, "", None), ("one", 0, "\n", 4)),
    ]
    assert rows[4]["prompt"] == CODE * 3 and rows[4]["prompt_tokens"] == 0 and np.isnan(rows[4]["logprobs"][0])
    assert [type(r["is_best"]) for r in rows] == [bool] * 6 and sum(r["is_best"] for r in rows[:2]) == 1
    assert rows[2]["top_logprobs"].shape == (1, 2) and rows[0]["top_logprobs"] is None
    assert "continuations" not in rows[0] and errors[0]["id"] == "bad" and errors[0]["input"]["label"] == 3
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["rows/is_greedy"].dtype == bool and file["rows/perplexity"].dtype == np.float64
    shown = hpcdecode("show", "o.h5", "1").stdout
    assert "logprob -" in shown and "perplexity " in shown and ", best\n" in shown
    for kind in ("jsonl", "csv", "parquet"):
        assert hpcdecode("export", "o.h5", "-o", f"o.{kind}", "--where", "is_best=true").returncode == 0
    best = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [row["id"] for row in best] == ["sum", "word", "text", "one"] and best[0]["is_best"] is True
    assert hpcdecode("report", "o.h5", "-o", "o.html").returncode == 0
    assert "tokens scored" in (tmp_path / "o.html").read_text()


def test_a_killed_job_goes_on_with_the_same_scores(hpcdecode, tmp_path):
    rows = [{"prompt": CODE * (1 + i % 4), "continuations": [f" {i}", " x = 1", "\n"]} for i in range(240)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("score", "p.jsonl", *FLAGS, "--checkpoint-every", 0.01, "--batch", 8)
    process = hpcdecode.start(*arguments, "-o", "killed.h5")
    parts, end = parts_folder(tmp_path / "killed.h5"), time.monotonic() + 120
    while not (parts.exists() and segment_files(parts)) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with package.read(tmp_path / "killed.h5") as results:
        assert not results.complete
    refused = hpcdecode("generate", "p.jsonl", *FLAGS, "--max-tokens", 1, "-o", "killed.h5")
    assert refused.returncode == 2 and "score was True and is None" in refused.stderr
    for output in ("killed.h5", "whole.h5"):
        assert hpcdecode(*arguments, "-o", output).returncode == 0
    with package.read(tmp_path / "killed.h5") as results:
        assert 0 < results.summary["rows"] < len(rows)
    assert scores(tmp_path / "killed.h5") == scores(tmp_path / "whole.h5")


def test_shards_are_merged_and_a_template_makes_prompts_of_a_table(hpcdecode, tmp_path):
    (tmp_path / "p.csv").write_text(
        'question,continuations,text\nOne,"[""two""]",x\nA list,"[""of""]",y\nThree,"[""four""]",z\n'
    )
    template = ("--prompt-template", "{{ text }}: {{ question }} ", "--keep-columns", "question")
    for i in range(2):
        job = hpcdecode("score", "p.csv", *FLAGS, *template, "--shard", f"{i}/2", "-o", f"{i}.h5")
        assert job.returncode == 0, job.stderr
    assert hpcdecode("merge", "o.h5", "0.h5", "1.h5").returncode == 0
    with package.read(tmp_path / "o.h5") as results:
        assert [(r["text"], r["question"]) for r in results] == [("two", "One"), ("of", "A list"), ("four", "Three")]


def test_a_job_file_of_generate_is_one_of_scores(hpcdecode, prompts, tmp_path):
    (tmp_path / "job.toml").write_text(f'prompts = ["{prompts}"]\ntemperature = 0.5\nn = 3\nlogprobs = 1\n')
    assert hpcdecode("score", "--job", "job.toml", *FLAGS, "-o", "o.h5", "--limit", 1).returncode == 0
    with package.read(tmp_path / "o.h5") as results:
        assert len(results) == 2 and results[1]["top_logprobs"].shape[1] == 1
    (tmp_path / "job.toml").write_text("score = true\n")
    assert "expected keys among" in hpcdecode("generate", prompts, "--job", "job.toml", *FLAGS).stderr


@pytest.mark.parametrize(
    ("lines", "flags", "reason"),
    [
        ("", ("--temperature", 1), "expected a known flag, got --temperature"),
        ("", ("--logprobs", 99), "--logprobs: expected an integer in [0, 20], got 99"),
        ('{"prompt": "a", "continuation": 1}', (), "line 1: continuation: expected a string"),
        ('{"question": "a"}', (), "expected exactly one of prompt, prompt_token_ids, messages"),
    ],
)
def test_a_job_that_cannot_score_ends_at_once(hpcdecode, tmp_path, lines, flags, reason):
    (tmp_path / "p.jsonl").write_text(lines + "\n")
    done = hpcdecode("score", "p.jsonl", *FLAGS, *flags)
    assert done.returncode == 2 and reason in done.stderr, done.stderr
    assert not (tmp_path / "p.h5").exists()
