"""Parts of an interrupted job that are damaged, gone or of another job: rows are generated again, or all is refused."""

from __future__ import annotations

import os
import shutil

import pytest

from hpcdecode.data.results.segments import parts_folder
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.errors import UserError
from hpcdecode.requests.prompt import Unfinished
from tests.support.resumed import begin, lines, result, segments_of


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.h5"


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "gone"])
def test_rows_of_a_damaged_segment_are_generated_again(path, which, how):
    files = segments_of(path, [1, 2], [3, 4], [5, 6])
    data = bytearray(files[which].read_bytes())
    place = data.index(b"text")
    data[place] ^= 1
    damaged = {"flip": data, "truncate": data[: len(data) // 2], "empty": b""}
    files[which].write_bytes(damaged[how]) if how != "gone" else files[which].unlink()
    earlier, out = begin(path)
    left = [line for line in range(1, 7) if not earlier.done(line)]
    assert left == [2 * which + 1, 2 * which + 2]
    assert len(earlier.warnings) == 1 and "generated again" in earlier.warnings[0]
    for line in left:
        out.add(result(line))
    out.checkpoint()
    assert sorted(lines(path)[0]) == [1, 2, 3, 4, 5, 6]
    out.close(complete=True, summary={}, rows_read=2)
    assert lines(path)[0] == [1, 2, 3, 4, 5, 6]
    assert os.listdir(path.parent) == [path.name]


def test_segments_of_another_job_are_refused(path, tmp_path):
    segments_of(path, [1, 2])
    other = tmp_path / "other.h5"
    out = ResultsWriter(other, attributes={"identity": {"x": 1}})
    out.add(result(9))
    out.close(complete=False, summary={})
    shutil.copy(parts_folder(other) / "seg-00000001-00000001.h5", parts_folder(path) / "seg-00000002-00000002.h5")
    with pytest.raises(UserError, match=r"seg-00000002-00000002\.h5: expected rows of this job"):
        begin(path)


def test_a_segment_that_is_there_twice_is_refused(path):
    (segment,) = segments_of(path, [1, 2])
    shutil.copy(segment, parts_folder(path) / "seg-00000002-00000002.h5")
    with pytest.raises(UserError, match="expected rows of its own"):
        begin(path)


@pytest.mark.parametrize("place", [0, 20, -10])
def test_damaged_tokens_in_flight_begin_anew(path, place):
    _, out = begin(path)
    out.unfinished = lambda: [Unfinished(2, 0, list(range(9)))]
    out.checkpoint()
    out.close(complete=False, summary={})
    file = parts_folder(path) / "unfinished.msgpack"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    earlier, _ = begin(path)
    assert not earlier.unfinished and "begin anew" in earlier.warnings[0]


def test_an_index_without_its_rows_is_refused(path):
    segments_of(path, [1])
    shutil.rmtree(parts_folder(path))
    with pytest.raises(UserError, match=r"expected its rows in .*out.h5.parts, found none"):
        begin(path)
