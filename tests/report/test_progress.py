"""Progress lines and the closing line of a job: what is done of how much, how fast, and what is left."""

from __future__ import annotations

import gzip
import json
import re
import signal
import time

import h5py
import pyarrow
import pyarrow.parquet
import pytest

from hpcdecode.data.prompts.total import RowTotal
from hpcdecode.report import progress as module
from hpcdecode.report.progress import Progress
from hpcdecode.report.text import closing
from hpcdecode.requests.shard import Shard


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def test_lines_come_from_the_first_second_on_and_then_more_seldom(clock, caplog):
    caplog.set_level("INFO")
    progress, times = Progress(bar=False, total=300), []
    for second in range(200):
        clock[0] = second
        if progress.due():
            times.append(second)
            progress.update(second, 100 * second, 50)
    assert times[:6] == [1, 2, 4, 8, 16, 32] and set(map(int.__sub__, times[6:], times[5:-1])) == {30}
    assert len(caplog.messages) == len(times)


def test_a_line_says_what_is_done_and_what_is_left(clock, caplog):
    caplog.set_level("INFO")
    progress = Progress(bar=False)
    known = [None]
    progress.expect(100, lambda: known[0])
    clock[0] = 10.0
    progress.update(20, 1000, 70, (20, 800))
    known[0] = 300
    progress.update(20, 1000, 70, (20, 800))
    first, second = caplog.messages
    assert first == "hpcdecode: 10 s: 120 rows, 2.0 rows/s, 100 tokens/s, 70 tokens in flight"
    left = "about 70 s left"  # 180 rows of 40 tokens, of which 200 are there, at 100 a second
    assert second == f"hpcdecode: 10 s: 120 of 300 rows (40%), 2.0 rows/s, 100 tokens/s, 70 tokens in flight, {left}"


def test_the_closing_line_tells_samples_apart_and_quotes_the_path():
    assert closing("out.h5", 300, 300, 298, 2) == ("results: out.h5 (300 of 300 rows, 2 errors): hpcdecode show out.h5")
    assert closing("my out.h5", 5, None, 12, 1) == (
        "results: my out.h5 (5 rows, 12 samples, 1 error): hpcdecode show 'my out.h5'"
    )


def counted(paths, **options):
    total, end = RowTotal([str(path) for path in paths], **options), time.monotonic() + 10
    while total.rows is None and time.monotonic() < end:
        time.sleep(0.01)
    return total.rows


@pytest.mark.parametrize(
    "text", ["", "\n\n", "a", "a\n", "a\n\n b\n  \n\tc", "\r\na\r\n\r\nb", "a" * 3_000_000 + "\nb\n"]
)
def test_rows_are_the_lines_that_are_not_blank(tmp_path, text):
    (tmp_path / "p.jsonl").write_bytes(text.encode())
    with gzip.open(tmp_path / "p.jsonl.gz", "wb") as file:
        file.write(text.encode())
    rows = sum(bool(line.strip()) for line in text.split("\n"))
    assert (
        counted([tmp_path / "p.jsonl"]) == rows and counted([tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"]) == 2 * rows
    )


def test_rows_of_tables_limits_and_shards(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 10}), tmp_path / "p.parquet")
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["rows/text"] = ["a"] * 7
    assert counted([tmp_path / "p.parquet"]) == 10 and counted([tmp_path / "p.h5"], column="rows/text") == 7
    assert counted([tmp_path / "p.parquet"], limit=4) == 4
    assert [counted([tmp_path / "p.parquet"], shard=Shard(i, 3)) for i in range(3)] == [3, 4, 3]


def test_a_job_that_went_on_counts_all_rows_to_its_last_line(hpcdecode, tmp_path):
    rows = [{"prompt": f"Line {n}", "max_tokens": 40 + n % 40, "n": 2 if n == 9 else 1} for n in range(100)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n")
    command = (
        "generate",
        "p.jsonl",
        "--model",
        "demo",
        "--ignore-eos",
        "--dtype",
        "float32",
        "--batch",  # so that many rows are left when the signal comes
        16,
        "--checkpoint-every",
        0.1,
    )
    process, end = hpcdecode.start(*command), time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end and not done(tmp_path / "p.h5"):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    found = re.search(r"\nresults: p\.h5 \((\d+) of 101 rows, .*\): hpcdecode show p\.h5\n$", err)
    assert process.returncode == 128 + signal.SIGTERM and found and 0 < int(found[1]) < 101
    result = hpcdecode(*command)
    assert result.returncode == 3
    last = "results: p.h5 (101 of 101 rows, 101 samples, 1 error): hpcdecode show p.h5"
    assert (result.stdout + result.stderr).splitlines()[-1] == last
    again = hpcdecode(*command)
    assert "complete already" in again.stdout + again.stderr and "hpcdecode show p.h5" in again.stdout + again.stderr


def done(path):
    if not path.exists():
        return 0
    with h5py.File(path) as file:
        return len(file["rows/line"])
