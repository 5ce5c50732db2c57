"""What a later run takes up from an earlier one, and what it refuses."""

import os
import shutil
from itertools import pairwise

import h5py
import msgspec
import pytest

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.resume import find_earlier
from hpcdecode.data.results.segments import parts_folder, segments_in
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.errors import InvariantViolation, UserError
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt, Unfinished
from tests.support.resumed import IDENTITY, begin, complete, lines, result


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.h5"


def test_runs_of_one_job_add_up(path):
    """20 runs, each ended after a few rows, merge on the way; the last one completes the job."""
    for run in range(20):
        earlier, out = begin(path, segment_rows=2)
        for line in range(1, 70):
            if (earlier is None or not earlier.done(line)) and run * 3 < line <= run * 3 + 4:
                out.error(RowError(line, "x", "bad")) if line % 10 == 0 else out.add(result(line))
        out.close(complete=False, summary={})
        covered = [(s.first, s.last) for s in segments_in(parts_folder(path))]
        assert all(a[1] + 1 == b[0] for a, b in pairwise(covered))
    earlier, out = begin(path)
    assert (earlier.rows, earlier.errors) == (55, 6) and out.error_count == 6
    out.close(complete=True, summary={})
    assert lines(path) == ([n for n in range(1, 62) if n % 10], list(range(10, 61, 10)))
    assert find_earlier(path, IDENTITY, overwrite=False).complete


def test_sequences_in_flight_go_on_where_they_were(path):
    _, out = begin(path)
    out.unfinished = lambda: [Unfinished(2, 0, [5, 6]), Unfinished(3, 0, [7])]
    out.checkpoint()
    out.add(result(3))
    out.close(complete=False, summary={})
    earlier, out = begin(path)
    prompts = [Prompt(n, str(n), [1, 1], SamplingParams()) for n in (1, 2)]
    first, second, _ = earlier.continued([*prompts, RowError(9, "9", "bad")])
    assert earlier.done(3) and not earlier.done(2)
    assert (first.token_ids, first.unfinished) == ([1, 1], [])
    assert (second.token_ids, second.unfinished) == ([1, 1], [Unfinished(2, 0, [5, 6])])
    out.close(complete=False, summary={})
    earlier, out = begin(path)  # a run that did not come to them has lost nothing
    assert earlier.unfinished[2] == {0: Unfinished(2, 0, [5, 6])}
    out.add(result(2))
    out.close(complete=False, summary={})
    assert 2 not in begin(path)[0].unfinished


@pytest.mark.parametrize(
    ("ids", "logprobs", "kept"),
    [([5, 6], [-0.5, -0.25], True), ([5, 6], [-0.5, -0.25, -1.0], False), ([5, 6], None, False), ([], [], False)],
)
def test_tokens_in_flight_are_taken_with_a_log_probability_each(path, ids, logprobs, kept):
    held = None if logprobs is None else Logprobs(logprobs, [[]] * len(logprobs), [[]] * len(logprobs))
    _, out = begin(path)
    out.unfinished = lambda: [Unfinished(2, 0, ids, held)]
    out.close(complete=False, summary={})
    earlier, _ = begin(path)
    (prompt,) = earlier.continued([Prompt(2, "2", [1, 1], SamplingParams(logprobs=0))])
    assert bool(prompt.unfinished) == kept


def test_another_job_is_refused_with_what_changed(path):
    _, out = begin(path)
    out.add(result(1))
    out.close(complete=False, summary={})
    other = msgspec.json.decode(msgspec.json.encode(IDENTITY))
    other["sampling"]["temperature"] = 0.7
    other["model"]["config.json"] = "8 bytes"
    with pytest.raises(UserError, match=r"model\.config\.json changed; sampling\.temperature was 0\.0 and is 0\.7"):
        find_earlier(path, other, overwrite=False)
    assert find_earlier(path, other, overwrite=True) is None


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("what", ["nothing", "errors", "a row", "a row and no index of it", "tokens in flight"])
def test_another_job_without_rows_is_replaced(path, what, complete):
    _, out = begin(path)
    if what == "errors":
        out.error(RowError(1, "1", "bad"))
    if what == "a row and no index of it":
        index = path.read_bytes()
    if what.startswith("a row"):
        out.add(result(1))
    if what == "tokens in flight":
        out.unfinished = lambda: [Unfinished(2, 0, [5, 6])]
    out.close(complete=complete and what != "a row and no index of it", summary={})
    if what == "a row and no index of it":
        path.write_bytes(index)
    other = {**IDENTITY, "dtype": "bfloat16"}
    if what.startswith("a row") or (what == "tokens in flight" and not complete):
        with pytest.raises(UserError, match="holds the rows of another job: dtype was"):
            find_earlier(path, other, overwrite=False)
        with pytest.raises(UserError, match="another job has written them meanwhile"):
            ResultsWriter(path, attributes={"identity": other}, overwrite=False)
        return
    assert find_earlier(path, other, overwrite=False) is None
    out = ResultsWriter(path, attributes={"identity": other}, overwrite=False)
    with pytest.raises(UserError, match="another job writes them"):
        find_earlier(path, IDENTITY, overwrite=False)
    out.add(result(1))
    out.close(complete=True, summary={})
    assert lines(path) == ([1], [])


def test_two_jobs_cannot_write_one_output(path):
    _, out = begin(path)
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"another job writes them \(process \d+ on "):
            earlier = find_earlier(path, IDENTITY, overwrite=overwrite)
            ResultsWriter(path, attributes={}, earlier=earlier)
    out.add(result(1))
    out.close(complete=True, summary={})
    assert lines(path) == ([1], [])


def test_a_file_that_is_no_result_is_refused(path):
    with h5py.File(path, "w") as file:
        file["x"] = 1
    with pytest.raises(UserError, match="expected the results of an earlier run of this job"):
        find_earlier(path, IDENTITY, overwrite=False)


@pytest.mark.parametrize(("limit", "goes_on"), [(1, False), (2, False), (3, True), (None, True)])
def test_a_complete_file_goes_on_where_more_rows_are_asked_for(path, limit, goes_on):
    complete(path, 2, limit=2)
    earlier = find_earlier(path, IDENTITY, overwrite=False, limit=limit)
    assert earlier.complete != goes_on and earlier.rows == 2
    assert [line for line in (1, 2, 3) if earlier.done(line)] == ([1, 2] if goes_on else [])


def test_a_complete_job_of_all_rows_is_complete_for_any_limit(path):
    complete(path, 2)
    assert all(find_earlier(path, IDENTITY, overwrite=False, limit=n).complete for n in (1, 2, 3, None))


@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.full)])
def test_rows_of_a_complete_file_are_in_the_output_at_every_moment(path, links, monkeypatch):
    """Killed at any change of the disk, and started again: no row is ever missing, and none comes twice."""
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for killed_at in range(100):
        path.unlink(missing_ok=True)
        shutil.rmtree(parts_folder(path), ignore_errors=True)
        complete(path, 5, limit=5)
        if in_a_child(path, killed_at):
            break
        earlier = find_earlier(path, IDENTITY, overwrite=False)
        assert earlier.complete or [n for n in range(1, 8) if not earlier.done(n)] in ([6, 7], [7], [])
        if not earlier.complete:
            out = ResultsWriter(path, attributes={"identity": IDENTITY}, earlier=earlier)
            for line in [n for n in range(1, 8) if not earlier.done(n)]:
                out.add(result(line))
            out.close(complete=True, summary={})
        assert lines(path) == ([1, 2, 3, 4, 5, 6, 7], [])
    assert 8 < killed_at < 99


def refuse(*_):
    raise OSError("no hard links here")


def in_a_child(path, killed_at):
    """Rows 6 and 7 are added by a process that ends at its system call `killed_at`; whether it came to its end."""
    child = os.fork()
    if child == 0:
        calls = iter(range(1000))
        for name in ("link", "rename", "replace", "unlink", "fsync", "mkdir", "rmdir"):
            setattr(os, name, ending(getattr(os, name), calls, killed_at))
        earlier = find_earlier(path, IDENTITY, overwrite=False)
        out = ResultsWriter(path, attributes={"identity": IDENTITY}, earlier=earlier)
        out.add(result(6))
        out.checkpoint()
        out.add(result(7))
        out.close(complete=True, summary={})
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def ending(function, calls, killed_at):
    def called(*arguments, **options):
        if next(calls) == killed_at:
            os._exit(1)
        return function(*arguments, **options)

    return called


def test_a_complete_file_that_changed_meanwhile_is_left_alone(path):
    complete(path, 2, limit=2)
    earlier = find_earlier(path, IDENTITY, overwrite=False)
    complete(path, 4, limit=4)
    with pytest.raises(UserError, match="another process has changed them"):
        ResultsWriter(path, attributes={"identity": IDENTITY}, earlier=earlier)
    assert lines(path)[0] == [1, 2, 3, 4]


def test_results_that_appeared_meanwhile_are_left_alone(path):
    assert find_earlier(path, IDENTITY, overwrite=False) is None
    complete(path, 2)
    with pytest.raises(UserError, match="another job has written them"):
        ResultsWriter(path, attributes={"identity": IDENTITY}, overwrite=False)
    assert lines(path)[0] == [1, 2]


def test_a_lost_or_repeated_row_is_never_complete(path):
    out = ResultsWriter(path, attributes={"identity": IDENTITY})
    out.add(result(1))
    with pytest.raises(InvariantViolation, match="every row that was read"):
        out.close(complete=True, summary={}, rows_read=2)
    assert [s.extent.rows for s in segments_in(parts_folder(path))] == [1]
    out.add(result(1))
    with pytest.raises(InvariantViolation, match="no row is in the results twice"):
        out.close(complete=True, summary={}, rows_read=2)
    with h5py.File(path) as file:
        assert not file.attrs["complete"]
