"""Input columns from the reader to results files, without a model: any values, in any commits, from any file."""

from __future__ import annotations

import json
import math
import random
import time
from datetime import datetime
from decimal import Decimal

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import hpcdecode
from hpcdecode.data.prompts import feed as feed_module
from hpcdecode.data.prompts.columns import pack, pack_columns, unpack
from hpcdecode.data.prompts.feed import RowFeed
from hpcdecode.data.prompts.kept import ALL, KeptColumns, Selection
from hpcdecode.data.prompts.rows import RowError, read_rows
from hpcdecode.data.results.join import join
from hpcdecode.data.results.resume import find_earlier
from hpcdecode.data.results.writer import Result, ResultsWriter
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt

IDENTITY = {"prompts": ["a"]}
VALUES = {
    "bool": lambda rng: rng.random() < 0.5,
    "int": lambda rng: rng.choice([0, -1, 2**53, -(2**63), 2**63 - 1]),
    "number": lambda rng: rng.choice([0, 1, -7, 0.5, 1e300, 2**53]),
    "long and float": lambda rng: rng.choice([2**53 + 1, 0.5]),
    "huge": lambda rng: rng.choice([2**63, 10**40, 1]),
    "words": lambda rng: rng.choice(["", "ä\n", "x" * 3000]),
    "nul": lambda rng: rng.choice(["a\0b", "c"]),
    "nested": lambda rng: rng.choice([[], [1, [2, {"a": None}]], {"b": 1.5}]),
    "any": lambda rng: rng.choice([None, True, 1, 0.1, "t", [None], {"k": "v"}, "null"]),
    "null": lambda rng: None,
}
NATIVE = {"bool": np.bool_, "int": np.int64, "number": np.float64}


def rows_of(count, seed=1):
    rng = random.Random(seed)
    rows = [{name: value(rng) for name, value in VALUES.items()} for _ in range(count)]
    for row in rows[:: count // 2]:  # a value is missing in some rows
        row["some"] = rng.randrange(9)
    return rows


def write(path, rows, lines, *, complete=True, earlier=None, names=ALL, **options):
    kept = KeptColumns(Selection(names))
    out = ResultsWriter(path, attributes={"identity": IDENTITY}, earlier=earlier, kept=kept, **options)
    for line in lines:
        kept.read(line, {"prompt": f"prompt {line}", **rows[line - 1]})
        if line % 10 == 3:
            out.error(RowError(line, str(line), "bad"))
        else:
            out.add(*(Result(line, str(line), sample, "t", "stop", 1, [line]) for sample in range(1 + line % 2)))
    out.close(complete=complete, summary={})


def datasets(path):
    with h5py.File(path) as file:
        found = {name: (str(d.dtype), d[:].tolist(), dict(d.attrs)) for name, d in file["input"].items()}
        return found, file["rows/prompt"][:].tolist(), file["input"].attrs["columns"], file["errors/input"][:].tolist()


def same(value, expected):
    return value == expected and type(value) in (type(expected), float)


def assert_columns(path, rows, lines):
    with hpcdecode.read(path) as results:
        seen = list(results)
        assert {row["line"] for row in seen} == {line for line in lines if line % 10 != 3}
        for row in seen:
            given = rows[row["line"] - 1]
            assert row["prompt"] == f"prompt {row['line']}" and row.get("some") == given.get("some")
            for name in VALUES:
                assert same(row[name], given[name]), (name, row[name], given[name])
        for error in results.errors():
            assert error["input"] == {"prompt": f"prompt {error['line']}", **rows[error["line"] - 1]}


def test_all_values_come_back_however_they_were_committed(tmp_path):
    rows, lines = rows_of(300), list(range(1, 301))
    write(tmp_path / "whole.h5", rows, lines)
    whole = datasets(tmp_path / "whole.h5")
    assert {n: np.dtype(t) for n, (t, *_) in whole[0].items() if t != "object"} == {
        n: np.dtype(t) for n, t in NATIVE.items()
    }
    assert not whole[0]["words"][2]["json"] and whole[0]["nul"][2]["json"] and whole[0]["some"][2]["json"]
    assert_columns(tmp_path / "whole.h5", rows, lines)
    random.Random(2).shuffle(lines)
    path = tmp_path / "parts.h5"
    for start in range(0, 300, 100):  # three runs of many commits
        earlier = find_earlier(path, IDENTITY, overwrite=False)
        write(path, rows, lines[start : start + 100], complete=start == 200, earlier=earlier, segment_rows=7)
        if start < 200:
            assert_columns(path, rows, lines[: start + 100])
    assert datasets(path) == whole


def test_a_type_that_changes_late_is_settled_at_the_end(tmp_path):
    rows = [{"x": n if n < 1999 else "text"} for n in range(2000)]
    write(tmp_path / "r.h5", rows, range(1, 1001), complete=False, segment_rows=64)
    with hpcdecode.read(tmp_path / "r.h5") as results:
        assert results.column("x").dtype == np.int64
    earlier = find_earlier(tmp_path / "r.h5", IDENTITY, overwrite=False)
    write(tmp_path / "r.h5", rows, range(1001, 2001), earlier=earlier, segment_rows=64)
    with h5py.File(tmp_path / "r.h5") as file:
        assert file["input/x"][0] == b"0" and file["input/x"][-1] == b'"text"'


def test_joined_files_have_the_columns_of_all(tmp_path):
    rows = [{"x": n} for n in range(40)] + [{"x": 0.5, "y": [n]} for n in range(40, 80)]
    write(tmp_path / "a.h5", rows, range(1, 41))
    write(tmp_path / "b.h5", rows, range(41, 81), complete=False, segment_rows=9)
    join(tmp_path / "c.h5", [tmp_path / "a.h5", tmp_path / "b.h5"])
    with hpcdecode.read(tmp_path / "c.h5") as results:
        assert all(
            (row["x"], row["y"]) == (rows[n - 1]["x"], rows[n - 1].get("y")) for row in results for n in [row["line"]]
        )
        assert results.column("x").dtype == np.float64


def test_floats_that_json_does_not_have(tmp_path):
    rows = [{"x": math.nan}, {"x": math.inf}, {}, {"x": 1.0}]
    write(tmp_path / "r.h5", rows[:2] + rows[3:], range(1, 3))
    with h5py.File(tmp_path / "r.h5") as file:
        assert np.isnan(file["input/x"][0]) and file["input/x"][2] == math.inf


def read(path, names=ALL, column=None):
    kept = KeptColumns(Selection(names, column))
    rows = list(read_rows([str(path)], SamplingParams(), column=column, kept=kept))
    return [unpack(kept.take(row.line)) for row in rows]


def test_parquet_columns_of_many_types(tmp_path, caplog):
    columns = {
        "prompt": ["a", "b"],
        "label": [1, None],
        "at": pyarrow.array([1, 2], pyarrow.timestamp("ns")),
        "blob": [b"\xff\x00", b""],
        "price": [Decimal("1.50"), Decimal("2")],
        "list": [[1, 2], None],
        "a.b": ["x", "y"],
        "a": [5, 6],
        "when": [datetime(2020, 1, 1), None],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    (prompt, first), (_, second) = read(tmp_path / "p.parquet")
    assert prompt == "a" and first.pop("list").data == b"[1,2]" and second["label"] is None and not caplog.messages
    assert first["at"] == "1970-01-01 00:00:00.000000001" and first["when"].startswith("2020-01-01 00:00:00")
    assert (first["blob"], first["price"], first["a.b"], first["a"], first["label"]) == ("/wA=", "1.50", "x", 5, 1)
    assert [columns for _, columns in read(tmp_path / "p.parquet", ("a.b",))] == [{"a.b": "x"}, {"a.b": "y"}]


def test_hdf5_columns_beside_the_prompts_are_kept_but_for_those_that_lie_elsewhere(tmp_path, caplog):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["rows/prompt"], file["rows/label"], file["rows/all"] = ["a", "b"], [1, 2], [[1, 2], [3, 4]]
        file["rows/longer"], file["rows/ok"] = [1, 2, 3], [True, False]
        file["rows/secret"] = h5py.ExternalLink("other.h5", "/x")
    first, _ = read(tmp_path / "p.h5", column="rows/prompt")
    assert first == ("a", {"label": 1, "ok": True})
    assert "secret: expected data that lie in this file" in caplog.messages[0] and "not kept" in caplog.messages[0]
    with pytest.raises(UserError, match="secret: expected data that lie in this file"):
        read(tmp_path / "p.h5", ("secret",), "rows/prompt")


def test_warnings_about_columns_that_are_kept_are_for_misspelt_fields_only(tmp_path, caplog):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "label": 1, "temprature": 0.5}) + "\n")
    ((_, columns),) = read(tmp_path / "p.jsonl")
    assert columns == {"label": 1, "temprature": 0.5}
    assert caplog.messages == [
        "hpcdecode: warning: line 1: field 'temprature' is not known and kept as a column; did you mean 'temperature'?"
    ]


def test_reading_ahead_is_bounded_by_the_bytes_of_kept_columns(monkeypatch):
    monkeypatch.setattr(feed_module, "_AHEAD_TOKENS", 1 << 10)
    made = []

    def endless():
        while True:
            made.append(None)
            yield Prompt(len(made), "1", [5], SamplingParams())

    feed = RowFeed(endless(), None, lambda line: 1 << 11)
    feed.pop()
    time.sleep(0.3)
    assert len(made) <= 2 * 2 + 2
    feed.close()


def test_rows_that_are_done_are_not_held():
    kept = KeptColumns(Selection(ALL))
    kept.read(1, {"prompt": "p", "id": 7, "custom_id": "c", "x": [1]})
    assert kept.size(1) > 0
    prompt, columns = unpack(kept.take(1))
    assert prompt == "p" and columns.keys() == {"custom_id", "x"} and kept.size(1) == 0 and kept.take(1) == b""


def damaged(path, change):
    write(path, [{"x": n, "y": "t"} for n in range(9)], range(1, 10))
    with h5py.File(path, "r+") as file:
        change(file)


def replaced(name, value):
    def change(file):
        del file[name]
        if value is not None:
            file[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        replaced("input/x", None),
        replaced("input/x", h5py.SoftLink("/rows/line")),
        replaced("input/x", h5py.ExternalLink("other.h5", "/x")),
        replaced("input/x", np.zeros(3)),
        replaced("input/x", np.zeros(3, np.int64)),
        replaced("input", h5py.SoftLink("/rows")),
        replaced("rows/prompt", np.zeros(13, np.int64)),
        lambda file: file["input"].attrs.modify("columns", "{"),
        lambda file: file["input"].attrs.modify("columns", '[true,false,[["x",64,1,0]]]'),
        lambda file: file["input"].attrs.modify("columns", '[true,false,[["../rows/line",4,1,0]]]'),
    ],
)
def test_damaged_columns_are_refused(tmp_path, change):
    damaged(tmp_path / "r.h5", change)
    with pytest.raises(UserError, match=r"r\.h5"), hpcdecode.read(tmp_path / "r.h5") as results:
        list(results)


def test_packed_rows_of_other_columns_than_listed_are_refused(tmp_path):
    write(tmp_path / "r.h5", [{"x": 1}] * 9, range(1, 10), complete=False)
    (segment,) = (tmp_path / "r.h5.parts").glob("seg-*")
    with h5py.File(segment, "r+") as file:
        packed = file["rows/input_json"]
        other = np.frombuffer(pack("prompt 1", pack_columns({"x": "t"})), np.uint8)
        packed[-len(other) :] = other
    with pytest.raises(UserError, match="expected the input columns that are listed"):
        join(tmp_path / "c.h5", [tmp_path / "r.h5"])
