"""The HDF5 output as plain h5py reads it: layout, order, what is visible when, what is refused."""

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results import merge, segments
from hpcdecode.data.results import writer as results
from hpcdecode.data.results.resume import find_earlier
from hpcdecode.data.results.writer import Result
from hpcdecode.errors import UserError
from tests.support.results_files import ATTRIBUTES, complete, contents, result, writer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.h5"


def test_layout_of_the_final_file(path):
    out = writer(path)
    out.add(result(3))
    out.error(RowError(2, "b", "bad"))
    out.close(complete=True, summary={"rows": 1})
    with h5py.File(path, "r") as file:
        assert set(file) == {"rows", "errors"} and set(file["errors"]) == {"line", "id", "reason"}
        rows = file["rows"]
        kinds = {"line": "i8", "sample": "i4", "prompt_tokens": "i4", "token_offsets": "i8", "token_ids": "i4"}
        kinds |= {"queued_at": "f8", "first_token_at": "f8", "finished_at": "f8"}
        assert set(rows) == {*kinds, "id", "text", "finish_reason"}
        assert {name: rows[name].dtype.str[1:] for name in kinds} == kinds
        strings = [rows["id"], rows["text"], file["errors/id"], file["errors/reason"]]
        assert all(h5py.check_string_dtype(d.dtype) == ("utf-8", None) for d in strings)
        assert h5py.check_enum_dtype(rows["finish_reason"].dtype) == {"stop": 0, "length": 1}
        assert file["errors/line"].dtype == np.int64
        assert file.attrs["complete"].dtype == bool and file.attrs["complete"]
        assert {k: json.loads(v) for k, v in file.attrs.items() if k != "complete"} == {
            **ATTRIBUTES,
            "summary": {"rows": 1},
        }
        assert not any(dataset.is_virtual for dataset in rows.values())
        assert rows["token_ids"].chunks and rows["token_ids"].compression == "gzip"
    assert os.listdir(path.parent) == ["out.h5"]


def test_an_empty_job(path):
    writer(path).close(complete=True, summary={})
    assert contents(path) == ([], []) and complete(path)
    with h5py.File(path, "r") as file:
        assert file["rows/token_offsets"][:].tolist() == [0]
        assert h5py.check_enum_dtype(file["rows/finish_reason"].dtype) == {"stop": 0, "length": 1}


def test_only_errors(path):
    out = writer(path, segment_rows=2)
    for line in (5, 1, 3):
        out.error(RowError(line, str(line), f"reason {line}"))
    out.close(complete=True, summary={})
    assert contents(path) == ([], [RowError(n, str(n), f"reason {n}") for n in (1, 3, 5)])


@pytest.mark.parametrize("segment_rows", [5, 50, 10_000])
def test_rows_are_sorted_by_line_and_sample_whatever_order_they_finished_in(path, segment_rows, monkeypatch):
    monkeypatch.setattr(merge, "BATCH_ROWS", 50)
    monkeypatch.setattr(merge, "BATCH_ENTRIES", 200)
    monkeypatch.setattr(merge, "_HEAD_ROWS", 1)
    expected = [result(line, sample) for line in range(1, 200) for sample in range(1 + line % 2)]
    bad = [RowError(line, f"e{line}", "x" * (line % 3)) for line in range(200, 250)]
    added = [*expected, *bad]
    random.Random(segment_rows).shuffle(added)
    out = writer(path, segment_rows=segment_rows)
    for item in added:
        out.add(item) if isinstance(item, Result) else out.error(item)
    out.checkpoint()
    rows, errors = contents(path)
    assert sorted(rows, key=lambda r: (r.line, r.sample)) == expected and len(errors) == len(bad)
    assert len(out._segments) <= 3 * results.FAN_IN
    out.close(complete=True, summary={})
    assert contents(path) == (expected, bad)


def test_unicode_nul_and_long_values(path):
    texts = ["", "日本語 😀", "a\0b", "\n\r\t", "x" * 300_000, "\ufffd", "e\u0301"]
    out = writer(path, attributes={**ATTRIBUTES, "topology": ["r" * 1000] * 1000})
    for line, text in enumerate(texts, start=1):
        out.add(result(line, text=text))
    out.error(RowError(99, "ключ", "причина\0"))
    out.close(complete=True, summary={})
    rows, errors = contents(path)
    assert [r.text for r in rows] == [t.replace("\0", "\ufffd") for t in texts]
    assert errors == [RowError(99, "ключ", "причина\ufffd")]
    with h5py.File(path, "r") as file:
        assert len(json.loads(file.attrs["topology"])) == 1000


def test_the_file_is_there_from_the_start_and_shows_each_commit(path):
    out = writer(path)
    assert contents(path) == ([], []) and not complete(path)
    out.add(result(2))
    assert contents(path) == ([], [])
    out.checkpoint()
    assert contents(path) == ([result(2)], [])
    out.error(RowError(1, "1", "bad"))
    out.add(result(4, count=0))
    out.add(result(3))
    out.checkpoint()
    assert contents(path) == ([result(2), result(3), result(4, count=0)], [RowError(1, "1", "bad")])
    with h5py.File(path, "r") as file:
        assert h5py.check_enum_dtype(file["rows/finish_reason"].dtype) == {"stop": 0, "length": 1}


def test_commits_come_by_themselves_by_rows_by_tokens_and_by_time(path, monkeypatch):
    out = writer(path, segment_rows=3)
    for line in (1, 2, 3):
        out.add(result(line))
    assert len(out._segments) == 1
    out.add(result(4, count=results.SEGMENT_TOKENS))
    assert len(out._segments) == 2
    out.add(result(5))
    clock = results.time.monotonic() + 2000
    monkeypatch.setattr(results.time, "monotonic", lambda: clock)
    out.tick()
    assert len(out._segments) == 3 and len(contents(path)[0]) == 5


def test_index_files_take_a_bounded_share_of_the_time(path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(results.time, "monotonic", lambda: clock[0])
    written = []

    def slow_image(*arguments):
        clock[0] += 1.0
        written.append(clock[0])
        return segments.index_image(*arguments)

    out = writer(path, segment_rows=1)
    monkeypatch.setattr(results, "index_image", slow_image)
    for line in range(1, 101):
        clock[0] += 1.0
        out.add(result(line, count=1))
    assert 3 <= len(written) <= 100 * results.COST_SHARE + 2
    out.checkpoint()
    assert len(contents(path)[0]) == 100


def test_an_interrupted_job_keeps_its_rows_and_its_parts(path):
    out = writer(path, segment_rows=2)
    for line in (1, 2, 3):
        out.add(result(line))
    out.close(complete=False, summary={"why": "SIGTERM"})
    out.close(complete=True, summary={})
    assert contents(path)[0] == [result(1), result(2), result(3)] and not complete(path)
    with h5py.File(path, "r") as file:
        assert json.loads(file.attrs["summary"]) == {"why": "SIGTERM"}
    assert sorted(p.name for p in segments.parts_folder(path).glob("*.h5")) == [
        "seg-00000001-00000001.h5",
        "seg-00000002-00000002.h5",
    ]


def test_the_directory_of_an_unfinished_output_can_move(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    out = writer(folder / "100%b.h5", segment_rows=2)
    for line in (1, 2, 3):
        out.add(result(line))
    out.close(complete=False, summary={})
    shutil.move(folder, tmp_path / "there")
    monkeypatch.chdir("/")
    assert contents(tmp_path / "there" / "100%b.h5")[0] == [result(1), result(2), result(3)]


def test_merged_segments_stay_a_while_for_readers_of_an_older_index(path, monkeypatch):
    out = writer(path, segment_rows=1)
    out.add(result(1))
    out.checkpoint()
    with h5py.File(path, "r") as old:
        for line in range(2, 20):
            out.add(result(line))
        out.checkpoint()
        assert len(out._segments) < 19
        assert old["rows/text"].asstr()[:].tolist() == ["täxt 1"]
    clock = results.time.monotonic() + 2 * results.READER_SECONDS
    monkeypatch.setattr(results.time, "monotonic", lambda: clock)
    out.add(result(20))
    out.checkpoint()
    assert {p.name for p in out._parts.glob("*.h5")} == {s.name for s in out._segments}
    assert len(contents(path)[0]) == 20


def test_segments_tell_which_commits_they_cover(path):
    out = writer(path, segment_rows=1)
    for line in range(1, 12):
        out.add(result(line))
    assert [(s.first, s.last) for s in out._segments] == [(1, 8), (9, 9), (10, 10), (11, 11)]
    assert out._segments[0].name == "seg-00000001-00000008.h5"


def test_an_existing_output_is_replaced_only_if_asked(path):
    out = writer(path)
    out.add(result(1))
    out.close(complete=False, summary={})
    writer(path, overwrite=True).close(complete=True, summary={})
    assert contents(path) == ([], [])


def test_an_index_that_is_gone_is_made_again(path):
    out = writer(path)
    out.add(result(1))
    out.close(complete=False, summary={})
    path.unlink()
    with pytest.raises(UserError, match="expected rows of this job, got those of another"):
        find_earlier(path, {"sampling": {"seed": 2}}, overwrite=False)
    again = writer(path)
    assert contents(path) == ([result(1)], [])
    again.close(complete=True, summary={})
    assert contents(path) == ([result(1)], [])


def test_outputs_are_written_by_several_threads_at_once(tmp_path):
    def write(number):
        out = writer(tmp_path / f"{number}.h5", segment_rows=1)
        for line in range(1, 13):
            out.add(result(line + number))
        out.close(complete=True, summary={})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    for number in range(4):
        assert contents(tmp_path / f"{number}.h5")[0] == [result(line + number) for line in range(1, 13)]
