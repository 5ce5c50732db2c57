"""The adapter that a row chooses: read from files, and in results, while a job runs, merged and exported."""

from __future__ import annotations

import json

import pytest

import hpcdecode
from hpcdecode.data.prompts.rows import RowError, read_rows
from hpcdecode.data.results.export import export
from hpcdecode.data.results.join import join
from hpcdecode.data.results.layout import shown_name
from hpcdecode.data.results.result import Result
from hpcdecode.data.results.show import show
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams

NAMES = ("chat", "sql")


def read(folder, text, name="rows.csv", adapters=NAMES):
    """Return number and name of each row's adapter, or why it cannot be used."""
    (folder / name).write_text(text)
    found = read_rows([str(folder / name)], SamplingParams(), adapters=adapters)
    return [row.reason if isinstance(row, RowError) else (row.adapter, row.lora) for row in found]


def test_tables_choose_none_by_an_empty_text(tmp_path):
    *rows, refused = read(tmp_path, "prompt,lora\na,sql\nb,\nc,chat\nd,other\n")
    assert rows == [(1, "sql"), (-1, ""), (0, "chat")]
    assert refused.endswith('lora: expected one of chat, sql, got "other"')
    lines = [json.dumps({"prompt": "a", "lora": name}) for name in ("", None, "sql")]
    assert read(tmp_path, "\n".join(lines), "rows.jsonl") == [(-1, ""), (-1, ""), (1, "sql")]


def test_rows_of_any_adapter_are_read_where_nothing_is_generated(tmp_path):
    body = {"model": "sql", "prompt": "a"}
    request = {"custom_id": "r", "url": "/v1/completions", "body": body}
    lines = [json.dumps(row) for row in ({"prompt": "a", "lora": "x"}, request, {"prompt": "a", "lora": 3})]
    *rows, refused = read(tmp_path, "\n".join(lines), "rows.jsonl", adapters=None)
    assert rows == [(-1, "x"), (-1, "")]
    assert refused.endswith("lora: expected the name of an adapter, got an integer 3")


def results(path, adapters, complete=True, first=1):
    out = ResultsWriter(path, attributes={"identity": {}, "model": {"path": "/models/base"}}, checkpoint_seconds=0)
    for line, name in enumerate(adapters, first):
        out.add(Result(line, f"id{line}", 0, f"text {line}", "stop", 3, [line], adapter=name))
    out.close(complete=complete, summary={})
    return str(path)


@pytest.mark.parametrize("complete", [True, False])
def test_results_say_who_made_a_row(tmp_path, complete):
    path = results(tmp_path / "r.h5", ["sql", "", "chat"], complete)
    with hpcdecode.read(path) as found:
        assert [row["adapter"] for row in found] == ["sql", None, "chat"]
        assert found.column("adapter").tolist() == ["sql", None, "chat"]
    for endpoint in ("chat", "completions"):
        export(path, str(tmp_path / f"{endpoint}.batch.jsonl"), endpoint=endpoint)
        answers = map(json.loads, (tmp_path / f"{endpoint}.batch.jsonl").read_text().splitlines())
        assert [answer["response"]["body"]["model"] for answer in answers] == ["sql", "base", "chat"]
    for ending in ("jsonl", "csv", "parquet"):
        export(path, str(tmp_path / f"r.{ending}"), where=["adapter=sql"])
    assert json.loads((tmp_path / "r.jsonl").read_text())["adapter"] == "sql"
    assert "1 of 3 rows meet adapter=null" in next(iter(show(path, where=["adapter=null"])))


def test_results_of_jobs_with_and_without_adapters(tmp_path):
    with_some, none = results(tmp_path / "a.h5", ["sql"]), results(tmp_path / "b.h5", ["", ""], first=2)
    with hpcdecode.read(none) as found:
        assert "adapter" not in found.columns
    with pytest.raises(UserError, match="--where adapter=sql: expected a column of line"):
        list(show(none, where=["adapter=sql"]))
    join(str(tmp_path / "all.h5"), [with_some, none])
    with hpcdecode.read(tmp_path / "all.h5") as found:
        assert [row["adapter"] for row in found] == ["sql", None, None]
    assert shown_name("adapter") == "adapter" and shown_name("adapter", ["adapter"]) == "input.adapter"
