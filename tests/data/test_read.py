"""Results read back: by line and id, as columns, exported and merged."""

import csv
import json
import random

import h5py
import numpy as np
import pyarrow.parquet
import pytest

import hpcdecode
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.export import export
from hpcdecode.data.results.join import join
from hpcdecode.data.results.show import show
from hpcdecode.data.results.writer import Result, ResultsWriter
from hpcdecode.errors import UserError
from hpcdecode.requests.shard import Shard

IDENTITY = {"model": {"config.json": "7 bytes"}, "prompts": ["a"], "sampling": {"seed": 1}}


def result(line, sample=0):
    reason = "stop" if line % 2 else "length"
    return Result(line, f"id-{line}", sample, f"täxt {line}.{sample}", reason, 3, list(range(line % 7)), 1.5, 2.5, line)


def write(path, lines, *, complete, bad=(), identity=IDENTITY):
    """A file of results that finished in random order; every fifth line has two samples."""
    rows = [result(line, sample) for line in lines for sample in range(2 if line % 5 == 0 else 1)]
    random.Random(1).shuffle(rows)
    attributes = {"identity": identity, "model": {"path": "/models/m"}}
    out = ResultsWriter(path, attributes=attributes, segment_rows=7, checkpoint_seconds=1000)
    for row in rows:
        out.add(row)
    for line in bad:
        out.error(RowError(line, f"id-{line}", "bad"))
    out.close(complete=complete, summary={"rows": len(rows)})
    return sorted(rows, key=lambda r: (r.line, r.sample))


@pytest.fixture(params=[True, False], ids=["complete", "interrupted"])
def stored(request, tmp_path):
    path = tmp_path / "out.h5"
    return path, write(path, range(1, 60), complete=request.param, bad=[70, 60])


def test_a_file_shows_itself(stored):
    path, rows = stored
    with hpcdecode.read(path) as results:
        state = "complete" if results.complete else "not complete"
        assert repr(results) == f"<Results of '{path}': {len(rows)} rows, {state}>"
        assert results.summary == {"rows": len(rows)}


def test_rows_come_by_line_and_sample(stored):
    path, rows = stored
    with hpcdecode.read(path) as results:
        assert len(results) == len(rows)
        assert [(r["line"], r["sample"], r["text"]) for r in results] == [(r.line, r.sample, r.text) for r in rows]
        assert [r["token_ids"].tolist() for r in results] == [r.token_ids for r in rows]
        assert results[10]["text"] == "täxt 10.0" and results[10]["finish_reason"] == "length"
        assert results[13]["token_ids"].tolist() == [0, 1, 2, 3, 4, 5]
        assert results.by_id("id-17")["line"] == 17
        assert results.column("finished_at").tolist() == [r.line for r in rows]
        assert [e["line"] for e in results.errors()] == [60, 70]
        assert results.attributes["summary"] == {"rows": len(rows)}
        for missing in (0, 60, 99):
            with pytest.raises(KeyError, match="is not among"):
                results[missing]
        with pytest.raises(KeyError, match="'perplexity' is not among the columns line, id, sample"):
            results.column("perplexity")  # which results of scores have
        with pytest.raises(KeyError, match="id-99"):
            results.by_id("id-99")


def test_show(stored):
    path, rows = stored
    heading, first, *_ = show(str(path))
    assert f"{len(rows)} rows, 2 errors" in heading and "line 1, id id-1, 3 + 1 tokens, stop\ntäxt 1.0" in first
    assert [text.split(",")[0] for text in list(show(str(path), ["7", "10", "70"]))[1:]] == [
        "\n--- line 7",
        "\n--- line 10",
        "\n--- line 10",
        "\n--- line 70",
    ]


def test_show_takes_ranges_and_ids_and_says_what_there_is_not(stored):
    path, _ = stored
    texts = list(show(str(path), ["4-6", "id-7", "5", "id-70", "100", "60-62", "98-99", "x\ny"]))[1:]
    assert [text.split(",")[0].strip("\n- ") for text in texts[:5]] == [f"line {n}" for n in (4, 5, 5, 6, 7)]
    assert [text.split(",")[0].strip("\n- ") for text in texts[5:7]] == ["line 60", "line 70"]
    missing = [text.strip("\n- ").split(":")[0] for text in texts[7:]]
    assert missing == ["line 100", "lines 98-99", "id x\\ny"] and "there is no such row" in texts[-1]
    with pytest.raises(UserError, match="a range of lines such as 1-5"):
        list(show(str(path), ["5-4"]))


def test_show_says_how_many_more_there_are(stored):
    path, rows = stored
    assert list(show(str(path)))[-1] == f"\n--- {len(rows) - 5} more rows: hpcdecode show {path} 6-10"


def test_formats_follow_the_ending_and_incomplete_files_warn(stored, tmp_path, caplog):
    path, rows = stored
    with hpcdecode.read(path) as results:
        complete = results.complete
    out = export(str(path), str(tmp_path / "r.csv"), columns=["line", "text", "finish_reason", "token_ids"])
    assert [m for m in caplog.messages if "is not complete" in m] == caplog.messages and len(caplog.messages) == (
        not complete
    )
    with open(out, newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert header == ["line", "text", "finish_reason", "token_ids"]
    assert lines == [[str(r.line), r.text, r.finish_reason, json.dumps(r.token_ids).replace(" ", "")] for r in rows]
    export(str(path), str(tmp_path / "r.jsonl"))
    export(str(path), str(tmp_path / "r.batch.jsonl"))
    assert (
        "custom_id" in (tmp_path / "r.batch.jsonl").read_text()
        and "custom_id" not in (tmp_path / "r.jsonl").read_text()
    )
    for out in ("r.txt", None):
        with pytest.raises(UserError, match=r"expected --to jsonl, csv, .* or -o FILE with one of the endings"):
            export(str(path), out)
    with pytest.raises(UserError, match="expected stop or length for finish_reason, got 'stopped'"):
        export(str(path), str(tmp_path / "x.jsonl"), where=["finish_reason=stopped"])


def test_export_to_json_lines_and_parquet(stored, tmp_path):
    path, rows = stored
    out = export(str(path), str(tmp_path / "o.jsonl"), "jsonl")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["line"], r["text"], r["token_ids"]) for r in lines] == [(r.line, r.text, r.token_ids) for r in rows]
    where = ["finish_reason=stop", "line >= 7", "id != id-9"]
    out = export(str(path), str(tmp_path / "o.parquet"), "parquet", columns=["id", "token_ids"], where=where)
    table = pyarrow.parquet.read_table(out).to_pylist()
    kept = [r for r in rows if r.finish_reason == "stop" and r.line >= 7 and r.line != 9]
    assert table == [{"id": r.id, "token_ids": r.token_ids} for r in kept]


def test_export_to_an_openai_batch(stored, tmp_path):
    path, _ = stored
    out = export(str(path), str(tmp_path / "o.jsonl"), "openai-batch", where=["line>=50"])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [*(f"id-{n}" for n in range(50, 61)), "id-70"]
    body = lines[0]["response"]["body"]
    assert lines[0]["response"]["status_code"] == 200 and lines[0]["error"] is None
    assert (body["object"], body["model"], len(body["choices"])) == ("chat.completion", "m", 2)
    assert body["choices"][1]["message"] == {"role": "assistant", "content": "täxt 50.1"}
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert lines[-1]["error"]["message"] == "bad" and lines[-1]["response"] is None
    with pytest.raises(UserError, match="exists already"):
        export(str(path), str(out), "openai-batch")
    out = export(str(path), str(out), "openai-batch", endpoint="completions", overwrite=True)
    first = json.loads(out.read_text().splitlines()[0])["response"]["body"]
    assert (first["object"], first["choices"][0]["text"]) == ("text_completion", "täxt 1.0")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"columns": ["texts"]}, "expected some of the columns line, .* got texts"),
        ({"where": ["text"]}, "--where text: expected COLUMN"),
        ({"where": ["texts=1"]}, "expected a column of"),
        ({"where": ["line=x"]}, "expected a number for line"),
    ],
)
def test_wrong_choices_are_refused(stored, tmp_path, options, expected):
    with pytest.raises(UserError, match=expected):
        export(str(stored[0]), str(tmp_path / "o"), "jsonl", **options)
    with pytest.raises(UserError, match="expected a results file"):
        hpcdecode.read(tmp_path / "none.h5")


def test_parts_of_a_job_become_one_file(tmp_path):
    rows = write(tmp_path / "a.h5", range(1, 60, 2), complete=True, bad=[61])
    rows += write(tmp_path / "b.h5", range(2, 60, 2), complete=False, bad=[62])
    paths = [str(tmp_path / "a.h5"), str(tmp_path / "b.h5")]
    join(str(tmp_path / "out.h5"), paths)
    with hpcdecode.read(tmp_path / "out.h5") as results:
        assert [r["text"] for r in results] == [r.text for r in sorted(rows, key=lambda r: (r.line, r.sample))]
        assert not results.complete and len(results.errors()) == 2
    with h5py.File(tmp_path / "out.h5") as file:
        assert np.all(np.diff(file["rows/line"][:]) >= 0)
    with pytest.raises(UserError, match="exists already"):
        join(str(tmp_path / "out.h5"), paths)
    with pytest.raises(UserError, match="expected a new file"):
        join(paths[0], paths, overwrite=True)
    with pytest.raises(UserError, match="are in the files more than once, the first of them line 1"):
        join(str(tmp_path / "twice.h5"), [paths[0], paths[0]])
    write(tmp_path / "c.h5", [99], complete=True, identity={**IDENTITY, "sampling": {"seed": 2}})
    with pytest.raises(UserError, match=r"sampling\.seed was 1 and is 2"):
        join(str(tmp_path / "other.h5"), [paths[0], str(tmp_path / "c.h5")])


def test_shards_merge_to_the_whole_job_and_no_other_way(tmp_path):
    def shard(name, of, prompts=("a",)):
        chosen = [line for line in range(1, 60) if of is None or Shard.parse(of).holds(line)]
        write(tmp_path / name, chosen, complete=True, identity={**IDENTITY, "prompts": list(prompts), "shard": of})
        return str(tmp_path / name)

    paths = [shard(f"{i}.h5", f"{i}/3") for i in (2, 0, 1)]
    whole = write(tmp_path / "whole.h5", range(1, 60), complete=True)
    join(str(tmp_path / "out.h5"), paths)
    with hpcdecode.read(tmp_path / "out.h5") as results:
        assert [(r["line"], r["sample"], r["text"]) for r in results] == [(r.line, r.sample, r.text) for r in whole]
        assert results.complete and results.attributes["identity"] == {**IDENTITY, "shard": None}
    for others, said in (
        (paths[:2], "expected all 3 shards, got 2: 1/3 missing"),
        ([*paths, shard("again.h5", "1/3")], r"again\.h5: is shard 1/3, as is .*1\.h5"),
        ([*paths, shard("quarter.h5", "3/4")], r"2\.h5 is shard 2/3, so expected another of them, got 3/4"),
        ([*paths, shard("all.h5", None)], "expected another of them, got no shard"),
        ([*paths[:2], shard("foreign.h5", "1/3", ("b",))], "holds rows of another job than .*: prompts changed"),
    ):
        with pytest.raises(UserError, match=said):
            join(str(tmp_path / "none.h5"), others)


@pytest.mark.parametrize("running", [True, False])
def test_token_counts_and_reasons_of_errors(tmp_path, running):
    """While the job runs, its rows lie in the order of their commits."""
    out = ResultsWriter(tmp_path / "r.h5", attributes={"identity": IDENTITY}, checkpoint_seconds=1000)
    for lines in ((20, 26, 24), (3, 2, 9), (13, 11, 12)):
        out.add(*map(result, lines))
        for line in lines:
            out.error(RowError(line + 30, "x", f"bad {line}"))
        out.checkpoint()
    if not running:
        out.close(complete=True, summary={})
    with hpcdecode.read(tmp_path / "r.h5") as results:
        assert results.token_counts().tolist() == [line % 7 for line in (2, 3, 9, 11, 12, 13, 20, 24, 26)]
        batches = [zip(lines, reasons, strict=True) for lines, reasons in results.error_reasons()]
        found = sorted((line, reason) for batch in batches for line, reason in batch)
        assert found == [(error["line"], error["reason"]) for error in results.errors()] and len(found) == 9
    out.close(complete=True, summary={})
