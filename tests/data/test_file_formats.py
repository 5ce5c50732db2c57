"""Prompt files of every format: rows, their numbers, and what is an error of a row or of the file."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys

import h5py
import pytest

from hpcdecode.data.prompts import files as inputs
from hpcdecode.data.prompts.files import require_formats
from hpcdecode.data.prompts.kept import ALL, KeptColumns, Selection
from hpcdecode.data.prompts.row_template import PromptOptions, RowTemplate
from hpcdecode.data.prompts.rows import Row, RowError, read_rows
from hpcdecode.data.prompts.total import RowTotal
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams
from tests.support.prompt_files import FORMATS, PACKED, ROWS, STREAMS, read, suffix, total, write


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packed", PACKED)
def test_every_format_gives_the_same_rows_whatever_its_name(tmp_path, name, packed):
    if packed and name not in STREAMS:
        return
    for ending in {suffix(name), suffix(name) + ".gz", ".txt"}:
        path = write(tmp_path / f"p{ending}", PACKED[packed](FORMATS[name]))
        kept = KeptColumns(Selection(ALL))
        rows = read(path, kept=kept)
        assert [row.prompt for row in rows] == [row["prompt"] for row in ROWS]
        assert [row.params.max_tokens for row in rows] == [5, 6, 7]
        lines = [1, 2, 3]
        assert [(row.line, row.id) for row in rows] == [(n, str(n)) for n in lines]
        assert b"\xf0\x9f\x98\x80" in kept.take(2)
        assert total(path) == 3


@pytest.mark.parametrize("name", FORMATS)
def test_columns_and_templates_work_with_every_format(tmp_path, name):
    path = write(tmp_path / f"p{suffix(name)}", FORMATS[name])
    first = read(path, column="label")
    assert [row.prompt if isinstance(row, Row) else None for row in first] == ["x", "é😀", None]
    made = read(path, template=RowTemplate(PromptOptions(prompt_template="{{ label }}:{{ row['prompt'] }}")))
    assert [row.prompt for row in made] == [f"{row['label']}:{row['prompt']}" for row in ROWS]
    if not name.startswith(("lines", "array")):
        with pytest.raises(UserError, match="expected a column 'none', found label, max_tokens, prompt; use --prompt-"):
            read(path, column="none")


def test_rows_are_numbered_through_files_of_several_formats(tmp_path):
    paths = [write(tmp_path / f"p{n}{suffix(name)}", FORMATS[name]) for n, name in enumerate(FORMATS)]
    bad = write(tmp_path / "z.csv", b'prompt,max_tokens\n"a\nb",3\n\n"",4\nc,x\n')
    rows = read(*paths, bad)
    good = 3 * len(FORMATS)
    assert [row.line for row in rows] == [*range(1, good + 4)]
    assert [row.prompt for row in rows[:good]] == [row["prompt"] for row in ROWS] * len(FORMATS)
    assert rows[good + 1].reason == f"{bad}:2: prompt: expected a string that is not empty, got an empty one"
    assert "z.csv:3: max_tokens: expected a 64-bit integer, got a string" in rows[good + 2].reason
    assert total(*paths, bad) == good + 3


def test_csv_fields_of_sampling_are_json_and_all_others_text(tmp_path):
    path = write(
        tmp_path / "p.csv",
        b"id,prompt,temperature,stop,seed,label,logit_bias\n"
        b'007,5,0.5,"[""x"", ""y""]",,8,"{""5"": 1}"\n'
        b'a,"",,.,3,,\n'
        b'b,null,,"\n",,,\n',
    )
    kept = KeptColumns(Selection(ALL))
    first, second, third = read(path, kept=kept)
    assert (first.id, first.prompt, first.params.temperature, first.params.stop) == ("007", "5", 0.5, ("x", "y"))
    assert first.params.logit_bias == {5: 1.0} and b"8" in kept.take(1)
    assert second.reason.startswith("prompt: expected a string that is not empty")
    assert third.prompt == "null" and third.params.stop == ()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"a", "expected 2 fields as in the header, got 1"),
        (b"a,b,c", "expected 2 fields as in the header, got 3"),
        (b'"a"b,c', "expected a record of CSV, got: ',' expected after '\"'"),
        (b"\xff\xfe,b", "prompt: expected a string, got a bytes"),
        (b'"a,b\n', "expected a record of CSV, got: unexpected end of data"),
    ],
)
def test_a_csv_record_that_cannot_be_read_is_an_error_of_its_own(tmp_path, record, reason):
    end = b"" if b'"a,b' in record else b"\nz,w\n"
    rows = read(write(tmp_path / "p.csv", b"prompt,label\nx,y\n" + record + end))
    assert [row.line for row in rows] == [1, 2, 3][: len(rows)] and rows[0].prompt == "x"
    assert rows[1].reason.startswith(reason)
    assert not end or rows[2].prompt == "z"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"prompt,prompt\na,b\n", "prompt: expected one column of this name, found 2"),
        (b",".join(b"c%d" % n for n in range(10_001)) + b"\n", "expected a column 'prompt'|at most 10000 columns"),
        (b'"prompt\n', "expected a header of columns, got: unexpected end of data"),
        (b"question,label\na,b\n", "found label, question; use --prompt-column question or --prompt-template"),
    ],
)
def test_a_csv_file_without_a_usable_header_is_refused(tmp_path, data, says):
    with pytest.raises(UserError, match=says):
        read(write(tmp_path / "p.csv", data))


def test_a_csv_file_of_nothing_has_no_rows(tmp_path):
    for data in (b"", b"\n \r\n", b"prompt\n", b"prompt\n\n\n"):
        assert read(write(tmp_path / "p.csv", data)) == []
        assert total(tmp_path / "p.csv") == 0
    (row,) = read(write(tmp_path / "p.csv", b",prompt\n0,a\n"))  # as pandas writes its index
    assert row.prompt == "a"


def test_a_csv_record_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 1000)
    for long in (b"x" * 1001, b'"' + b"x\n" * 501 + b'"', b'"' + b'""' * 501 + b'"'):
        with pytest.raises(UserError, match="a record of more than 1000 bytes; are its quotes closed"):
            read(write(tmp_path / "p.csv", b"prompt\na\n" + long + b"\nb\n"))
    assert len(read(write(tmp_path / "p.csv", b"prompt\n" + b'"' + b"x\n" * 400 + b'"\n'))) == 1


def test_elements_of_an_array_are_bounded_and_independent(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 1000)
    texts = [
        '{"prompt": "a"}',
        "7",
        '{"prompt": "' + "x" * 1000 + '"}',
        '{"prompt": "b" "c"}',
        '{"prompt": "\\"],[{"}',
        "",
    ]
    path = write(tmp_path / "p.json", f"[ {' , '.join(texts)} ]".encode())
    rows = read(path)
    assert [row.prompt if isinstance(row, Row) else None for row in rows] == ["a", None, None, None, '"],[{', None]
    assert [row.reason.split(", got ")[-1][:12] for row in rows if isinstance(row, RowError)] == [
        "an integer",
        "a longer one",
        "invalid JSON",
        "invalid JSON",
    ]
    assert [row.line for row in rows] == [1, 2, 3, 4, 5, 6] and read(write(path, b" [ \n ] ")) == []
    monkeypatch.setattr(inputs, "MAX_SKIPPED_BYTES", 5000)
    with pytest.raises(UserError, match="expected a whole file of its kind, got: an element of more than 0 MiB"):
        read(write(path, b'[{"prompt": "' + b"x" * 6000 + b'"}]'))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_of_an_array_may_end_anywhere(tmp_path, monkeypatch, size):
    monkeypatch.setattr("hpcdecode.data.prompts.json_array._CHUNK_BYTES", size)
    texts = ["\\", '\\"', 'a"b', "[{", "}]", ",", "é😀", "\\\\\\"]
    path = write(tmp_path / "p.json", json.dumps([{"prompt": t, "x": [[], {"y": [t]}]} for t in texts]).encode())
    assert [row.prompt for row in read(path)] == texts
    assert total(path) == len(texts)


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("csv", "tsv", "lines") and "csv" not in n])
def test_a_truncated_file_is_said_to_be_one(tmp_path, name):
    data = FORMATS[name]
    for count in (len(data) - 3, len(data) // 2, 40):
        if name == "arrow stream" and count == len(data) - 3:
            continue  # the mark of the end may be missing
        with pytest.raises(UserError, match=r"expected a whole file of its kind, got|seems to be"):
            read(write(tmp_path / "p", data[:count]))


def test_tables_are_read_from_files_of_their_own(tmp_path):
    path = write(tmp_path / "p.parquet.gz", gzip.compress(FORMATS["parquet"]))
    with pytest.raises(
        UserError, match="expected Parquet in a file of its own, got one that is packed by gzip; unpack"
    ):
        read(path)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(writer, FORMATS["arrow file"])
    require_formats([str(tmp_path / "pipe")])  # left alone
    with pytest.raises(UserError, match="got a pipe; give the name of a file"):
        read(tmp_path / "pipe")
    os.close(writer)


def test_a_pipe_with_a_name_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(writer, FORMATS["csv"])
    counted = RowTotal([str(tmp_path / "pipe")])
    rows = read_rows([str(tmp_path / "pipe")], SamplingParams())
    os.close(writer)
    assert len(list(rows)) == 3 and counted.rows is None


@pytest.mark.parametrize("packed", PACKED)
def test_standard_input_has_any_format_that_can_be_streamed(monkeypatch, packed):
    for name in STREAMS:
        stream = io.BytesIO(PACKED[packed](FORMATS[name]))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(stream)))
        assert [row.prompt for row in read("-")] == [row["prompt"] for row in ROWS]


def test_an_hdf5_file_by_any_name(tmp_path):
    with h5py.File(tmp_path / "p.results", "w") as file:
        file["prompt"] = ["a", "b"]
    assert [row.prompt for row in read(tmp_path / "p.results")] == ["a", "b"]
    assert total(tmp_path / "p.results") == 2
