"""Places that results cannot be written to, and what is spared there."""

import shutil

import pytest

from hpcdecode.data.results import segments
from hpcdecode.data.results.writer import Result
from hpcdecode.errors import UserError
from tests.support.results_files import complete, contents, result, writer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.h5"


def test_places_that_cannot_be_written(tmp_path, path):
    with pytest.raises(UserError, match="expected an existing directory"):
        writer(tmp_path / "none" / "out.h5")
    with pytest.raises(UserError, match="got a directory"):
        writer(tmp_path, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="expected an existing directory"):
        writer(tmp_path / "file" / "out.h5")
    with pytest.raises(UserError, match="File name too long"):
        writer(tmp_path / ("x" * 300))


def test_overwrite_spares_what_is_no_output(path):
    path.write_text('{"prompt": "my prompts"}\n')
    with pytest.raises(UserError, match="expected an HDF5 file to continue or replace"):
        writer(path, overwrite=True)
    assert "my prompts" in path.read_text()


def test_foreign_files_in_the_parts_folder_are_spared(path):
    writer(path).close(complete=False, summary={})
    note = segments.parts_folder(path) / "note.txt"
    note.write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        writer(path, overwrite=True)
    note.rename(path.with_name("note"))
    out = writer(path, overwrite=True)
    path.with_name("note").rename(note)
    out.close(complete=True, summary={})
    assert complete(path)
    assert note.read_text() == "mine"


def test_an_unknown_finish_reason_is_refused(path):
    with pytest.raises(ValueError, match="finish_reason"):
        writer(path).add(Result(1, "1", 0, "", "abort", 1, []))


def test_a_vanished_directory_is_a_user_error(path):
    out = writer(path)
    out.add(result(1))
    shutil.rmtree(segments.parts_folder(path))
    with pytest.raises(UserError, match=r"out\.h5: writing failed: No such file or directory"):
        out.checkpoint()
    segments.parts_folder(path).mkdir()
    out.close(complete=True, summary={})
    assert contents(path)[0] == [result(1)]
