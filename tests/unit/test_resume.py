"""What a later run takes up from an earlier one, and what it refuses."""

from itertools import pairwise

import h5py
import msgspec
import pytest

from hpcdecode.data.prompts import RowError
from hpcdecode.data.results import Result, ResultsWriter
from hpcdecode.data.resume import Unfinished, find_earlier
from hpcdecode.data.segments import parts_folder, segments_in
from hpcdecode.data.tokens import Prompt
from hpcdecode.errors import UserError
from hpcdecode.sampling.params import SamplingParams

IDENTITY = {"model": {"config.json": "7 bytes"}, "sampling": {"seed": 1, "temperature": 0.0}, "dtype": "float32"}


def result(line):
    return Result(line, f"row-{line}", 0, f"text {line}", "stop", 3, list(range(line % 5)))


def begin(path, **options):
    earlier = find_earlier(path, IDENTITY, overwrite=False)
    options = {"attributes": {"identity": IDENTITY}, "checkpoint_seconds": 1000, **options}
    return earlier, ResultsWriter(path, earlier=earlier, **options)


def lines(path):
    with h5py.File(path) as file:
        ids = [file["rows/token_ids"][a:b].tolist() for a, b in pairwise(file["rows/token_offsets"][:])]
        found = file["rows/line"][:].tolist()
        assert ids == [list(range(line % 5)) for line in found]
        return found, file["errors/line"][:].tolist()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.h5"


def test_runs_of_one_job_add_up(path):
    """40 runs, each ended after a few rows, merge on the way; the last one completes the job."""
    for run in range(40):
        earlier, out = begin(path, segment_rows=2)
        for line in range(1, 130):
            if (earlier is None or not earlier.done(line)) and run * 3 < line <= run * 3 + 4:
                out.error(RowError(line, "x", "bad")) if line % 10 == 0 else out.add(result(line))
        out.close(complete=False, summary={})
        covered = [(s.first, s.last) for s in segments_in(parts_folder(path))]
        assert all(a[1] + 1 == b[0] for a, b in pairwise(covered))
    earlier, out = begin(path)
    assert (earlier.rows, earlier.errors) == (109, 12) and out.error_count == 12
    out.close(complete=True, summary={})
    assert lines(path) == ([n for n in range(1, 122) if n % 10], list(range(10, 121, 10)))
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


def test_another_job_is_refused_with_what_changed(path):
    _, out = begin(path)
    out.close(complete=False, summary={})
    other = msgspec.json.decode(msgspec.json.encode(IDENTITY))
    other["sampling"]["temperature"] = 0.7
    other["model"]["config.json"] = "8 bytes"
    with pytest.raises(UserError, match=r"model\.config\.json changed; sampling\.temperature was 0\.0 and is 0\.7"):
        find_earlier(path, other, overwrite=False)
    assert find_earlier(path, other, overwrite=True) is None


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
