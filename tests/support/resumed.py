"""Results of one small job, which later runs take up: begun, completed, and read by plain h5py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import h5py

from hpcdecode.data.results.earlier import EarlierRun
from hpcdecode.data.results.result import Result
from hpcdecode.data.results.resume import find_earlier
from hpcdecode.data.results.segments import parts_folder, segments_in
from hpcdecode.data.results.writer import ResultsWriter

IDENTITY = {"model": {"config.json": "7 bytes"}, "sampling": {"seed": 1, "temperature": 0.0}, "dtype": "float32"}


def result(line: int) -> Result:
    return Result(line, f"row-{line}", 0, f"text {line}", "stop", 3, list(range(line % 5)))


def begin(path: Path, **options: object) -> tuple[EarlierRun | None, ResultsWriter]:
    """Return what an earlier run has left, and the writer of a run that takes it up."""
    earlier = find_earlier(path, IDENTITY, overwrite=False)
    options = {"attributes": {"identity": IDENTITY}, "checkpoint_seconds": 1000, **options}
    return earlier, ResultsWriter(path, earlier=earlier, **options)


def lines(path: Path) -> tuple[list[int], list[int]]:
    """Return the lines of rows and of errors, after a check of the rows' tokens."""
    with h5py.File(path) as file:
        ids = [file["rows/token_ids"][a:b].tolist() for a, b in pairwise(file["rows/token_offsets"][:])]
        found = file["rows/line"][:].tolist()
        assert ids == [list(range(line % 5)) for line in found]
        return found, file["errors/line"][:].tolist()


def complete(path: Path, count: int, limit: int | None = None) -> None:
    """Write a complete file of so many rows, of a job with that limit."""
    out = ResultsWriter(path, attributes={"identity": IDENTITY, "job": {"limit": limit}}, checkpoint_seconds=1000)
    for line in range(1, count + 1):
        out.add(result(line))
    out.close(complete=True, summary={})


def segments_of(path: Path, *rows: list[int]) -> list[Path]:
    """Leave an interrupted job with one segment for each list of lines; return their paths."""
    _, out = begin(path)
    for each in rows:
        for line in each:
            out.add(result(line))
        out.checkpoint()
    out.close(complete=False, summary={})
    return [parts_folder(path) / s.name for s in segments_in(parts_folder(path))]
