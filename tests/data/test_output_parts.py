"""Reasoning, content and calls in results files: written, committed, merged, read, shown and exported."""

from __future__ import annotations

import csv
import json

import h5py
import pyarrow.parquet as pq
import pytest

import hpcdecode
from hpcdecode.data.results.export import export
from hpcdecode.data.results.layout import shown_name
from hpcdecode.data.results.result import Result
from hpcdecode.data.results.show import show
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.errors import UserError

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
ROWS = [  # text, reasoning, content, calls; empty parts are those that are not there
    ("<think>hm</think>So.", "hm", "So.", []),
    ("Plain.", "", "Plain.", []),
    ("<think>hm</think><tool_call>...</tool_call>", "hm", "", [CALL]),
    ("", "", "", []),
]


def results(path, *, complete=True, parsed=True):
    out = ResultsWriter(path, attributes={"identity": {}, "model": {"path": "/m"}}, checkpoint_seconds=0)
    for line, (text, *parts) in enumerate(ROWS, 1):
        own = dict(zip(("reasoning", "content", "tool_calls"), parts, strict=True)) if parsed else {}
        out.add(Result(line, f"id{line}", 0, text, "length" if line == 4 else "stop", 3, [line], **own))
    out.close(complete=complete, summary={})
    return path


@pytest.mark.parametrize("complete", [True, False])
def test_rows_have_their_parts(tmp_path, complete):
    with hpcdecode.read(results(tmp_path / "r.h5", complete=complete)) as found:
        rows = list(found)
    for row, (text, reasoning, content, calls) in zip(rows, ROWS, strict=True):
        assert row["text"] == text
        assert (row["reasoning"], row["content"]) == (reasoning or None, content or None)
        assert row["tool_calls"] == (calls or None)
    shown = "\n".join(show(str(tmp_path / "r.h5")))
    assert "reasoning: hm\nSo.\n" in shown and 'reasoning: hm\ncall: f {"a": "é"}' in shown and "\nPlain." in shown


def test_texts_that_are_left_whole_have_no_parts(tmp_path):
    with hpcdecode.read(results(tmp_path / "r.h5", parsed=False)) as found:
        assert not {"reasoning", "content", "tool_calls"} & {*found.columns}


def test_answers_of_a_batch(tmp_path):
    export(str(results(tmp_path / "r.h5")), str(tmp_path / "r.batch.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "r.batch.jsonl").read_text().splitlines()]
    choices = [line["response"]["body"]["choices"][0] for line in lines]
    assert [choice["message"] for choice in choices] == [
        {"role": "assistant", "content": "So.", "reasoning_content": "hm", "reasoning": "hm"},
        {"role": "assistant", "content": "Plain."},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "assistant", "content": ""},
    ]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop", "tool_calls", "length"]


def test_other_exports(tmp_path):
    source = str(results(tmp_path / "r.h5"))
    for name in ("r.jsonl", "r.csv", "r.parquet"):
        export(source, str(tmp_path / name))
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [row["tool_calls"] for row in rows] == [None, None, [CALL], None] and rows[1]["reasoning"] is None
    with open(tmp_path / "r.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert table[0]["reasoning"] == "hm" and json.loads(table[2]["tool_calls"]) == [CALL] and not table[2]["content"]
    columns = pq.read_table(tmp_path / "r.parquet").to_pydict()
    assert columns["content"] == ["So.", "Plain.", None, None] and json.loads(columns["tool_calls"][2]) == [CALL]
    with pytest.raises(UserError, match="--where content=a: expected a column of line"):
        export(source, str(tmp_path / "w.jsonl"), where=["content=a"])


def test_input_columns_of_these_names():
    """They keep their names where texts are left whole, as in results of earlier versions."""
    assert shown_name("content") == "content" and shown_name("text") == "input.text"
    assert shown_name("content", ["content"]) == "input.content"


@pytest.mark.parametrize(
    "calls", ["[", "{}", '[{"a": 1}]', '[{"id": "a", "type": "function", "function": {"name": 1}}]']
)
def test_damaged_calls_are_said(tmp_path, calls):
    path = results(tmp_path / "r.h5")
    with h5py.File(path, "r+") as file:
        file["rows/tool_calls"][2] = calls
    for use in (lambda: list(show(str(path))), lambda: export(str(path), str(tmp_path / "r.batch.jsonl"))):
        with pytest.raises(UserError, match="expected a results file of hpcdecode generate"):
            use()
