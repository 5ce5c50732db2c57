"""Where commands may write: only regular files are replaced, links are followed, `-` is standard output."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import threading
from pathlib import Path

import h5py
import pytest

from hpcdecode.data.results.writer import Result, ResultsWriter
from tests.support.commands import run

ROWS = 5000
ONE = ("generate", "p.jsonl", "--model", "demo", "--dtype", "float32", "--max-tokens", 2)


@pytest.fixture
def results(tmp_path):
    out = ResultsWriter(tmp_path / "r.h5", attributes={"identity": {}, "job": {}, "summary": {}})
    for line in range(1, ROWS + 1):
        out.add(Result(line, str(line), 0, f"text {line}", "stop", 1, [line]))
    account = {"rank": 0, "host": "h", "role": "SR", "seconds": {"slice": 1.0}, "load": []}
    out.close(complete=True, summary={"accounts": [account]})
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    return tmp_path / "r.h5"


def piped(hpcdecode, *arguments, then="cat"):
    """The bytes that `then` makes of the command's standard output, and the finished command."""
    made = hpcdecode.directory / "made"
    with open(made, "wb") as file, subprocess.Popen(["sh", "-c", then], stdin=subprocess.PIPE, stdout=file) as reader:
        process = started(hpcdecode, *arguments, stdout=reader.stdin)
        reader.stdin.close()
        _, err = process.communicate(timeout=60)
    return made.read_bytes(), subprocess.CompletedProcess(process.args, process.returncode, "", err)


def started(hpcdecode, *arguments, stdout):
    options = {"cwd": hpcdecode.directory, "env": hpcdecode.environment, "text": True, "stderr": subprocess.PIPE}
    return subprocess.Popen(hpcdecode.line(*arguments), stdout=stdout, **options)


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_exports_to_standard_output(hpcdecode, results, name):
    before = os.lstat("/dev/stdout")
    made, process = piped(hpcdecode, "export", results, "--to", "jsonl", "-o", name, "--overwrite")
    assert process.returncode == 0 and process.stderr == ""
    assert [json.loads(line)["text"] for line in made.splitlines()] == [f"text {n}" for n in range(1, ROWS + 1)]
    assert os.lstat("/dev/stdout").st_ino == before.st_ino


def test_parquet_through_a_pipe(hpcdecode, results, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    made, process = piped(hpcdecode, "export", results, "--to", "parquet", "-o", "-")
    assert process.returncode == 0, process.stderr
    (tmp_path / "made.parquet").write_bytes(made)
    assert parquet.read_table(tmp_path / "made.parquet")["line"].to_pylist() == list(range(1, ROWS + 1))


@pytest.mark.parametrize("command", [("export", "r.h5", "--to", "jsonl", "-o", "-"), ("show", "r.h5", *range(1, ROWS))])
def test_a_reader_that_ends_early_ends_the_command_quietly(hpcdecode, results, command):
    made, process = piped(hpcdecode, *command, then="head -n 1")
    assert made and process.returncode == 141 and process.stderr == ""


def test_a_full_disk_behind_standard_output(hpcdecode, results):
    for command in (("export", "r.h5", "--to", "jsonl", "-o", "-"), ("show", "r.h5")):
        with open("/dev/full", "wb") as full:
            process = started(hpcdecode, *command, stdout=full)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and "No space left" in err and "Traceback" not in err and "ignored" not in err


def test_a_fifo_is_written_to(hpcdecode, results, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    made = []
    reader = threading.Thread(target=lambda: made.append((tmp_path / "fifo").read_bytes()), daemon=True)
    reader.start()
    result = hpcdecode("export", results, "--to", "jsonl", "-o", "fifo", "--columns", "line")
    reader.join(10)
    assert result.returncode == 0 and len(made[0].splitlines()) == ROWS
    assert stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)


WRITERS = {
    "export": ("export", "r.h5", "--to", "jsonl", "--overwrite", "-o"),
    "merge": ("merge", "OUT", "r.h5", "--overwrite"),
    "report": ("report", "r.h5", "-o"),
    "generate": (*ONE, "--overwrite", "-o"),
    "trace": (*ONE, "-o", "x.h5", "--overwrite", "--trace"),
}


def line_of(writer, out):
    command = WRITERS[writer]
    return [out if part == "OUT" else part for part in command] if "OUT" in command else [*command, out]


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_no_file_is_never_replaced(hpcdecode, results, tmp_path, writer):
    (tmp_path / "folder").mkdir()
    places = {"a directory": "folder", "a device": "/dev/null", "a socket": "socket"}
    if writer != "export":
        os.mkfifo(tmp_path / "fifo")
        places["a FIFO"] = "fifo"
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(tmp_path / "socket"))
        for kind, place in places.items():
            before = os.lstat(tmp_path / place)
            result = hpcdecode(*line_of(writer, place))
            assert result.returncode == 2 and f"got {kind}" in result.stderr, result.stderr
            after = os.lstat(tmp_path / place)
            assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("there", [True, False])
def test_links_are_followed(hpcdecode, results, tmp_path, writer, there):
    pytest.importorskip("matplotlib") if writer == "report" else None
    (tmp_path / "away").mkdir()
    target, name = tmp_path / "away" / "target.png", "link.png"
    if there:
        target.write_bytes(b"") if writer in ("generate", "merge") else target.write_bytes(b"old")
    os.symlink("away/target.png", tmp_path / name)
    result = hpcdecode(*line_of(writer, name))
    assert result.returncode == 0, result.stderr
    assert os.readlink(tmp_path / name) == "away/target.png"
    assert target.stat().st_size > 3 and not target.is_symlink()
    assert os.listdir(tmp_path / "away") == ["target.png"]


@pytest.mark.parametrize("trace", ["x.h5", "p.jsonl", "./p.jsonl"])
def test_a_trace_replaces_no_file_of_the_job(hpcdecode, results, tmp_path, trace):
    result = hpcdecode(*ONE, "-o", "x.h5", "--trace", trace)
    assert result.returncode == 2 and "expected a file of its own" in result.stderr
    assert (tmp_path / "p.jsonl").read_text() == '{"prompt": "a"}\n'


def test_a_job_behind_a_link_goes_on(hpcdecode, results, tmp_path):
    """Its parts lie beside the target; the index is read by way of the link."""
    (tmp_path / "away").mkdir()
    os.symlink("away/x.h5", tmp_path / "x.h5")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' * 3 + "{\n")
    stopped = hpcdecode(*ONE, "-o", "x.h5", "--fail-fast")
    assert stopped.returncode == 2 and (tmp_path / "away" / "x.h5.parts").is_dir()
    with h5py.File(tmp_path / "x.h5") as file:
        assert len(file["errors/line"]) == 1
    assert hpcdecode("show", "x.h5").returncode == 0
    assert hpcdecode(*ONE, "-o", "x.h5").returncode == 3
    with h5py.File(tmp_path / "away" / "x.h5") as file:
        assert file["rows/line"][:].tolist() == [1, 2, 3]
    assert sorted(path.name for path in Path(tmp_path).glob("x*")) == ["x.h5"]


@pytest.mark.parametrize("flags", [(), ("--shard", "0/2")])
def test_a_larger_limit_goes_on(hpcdecode, tmp_path, flags):
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(1, 8)))
    wanted = [n for n in range(1, 8) if not flags or n % 2 == 0]
    assert hpcdecode(*ONE, *flags, "-o", "whole.h5").returncode == 0
    for limit in (2, 4, None, 3):
        asked = () if limit is None else ("--limit", limit)
        result = hpcdecode(*ONE, *flags, "-o", "x.h5", *asked)
        assert result.returncode == 0, result.stderr
        with h5py.File(tmp_path / "x.h5") as file:
            shown = [n for n in wanted if limit in (None, 3) or n <= limit]
            assert file["rows/line"][:].tolist() == shown and file.attrs["complete"]
    assert "complete already" in result.stderr
    assert ("--limit 3 takes none of them away" in result.stderr) == (not flags)
    with h5py.File(tmp_path / "x.h5") as made, h5py.File(tmp_path / "whole.h5") as whole:
        assert made["rows/token_ids"][:].tolist() == whole["rows/token_ids"][:].tolist()
    (tmp_path / "p.jsonl").write_text('{"prompt": "another"}\n')
    assert "prompts changed" in run(hpcdecode.line(*ONE, *flags, "-o", "x.h5"), cwd=tmp_path).stderr


def test_a_page_is_written_by_its_ending(hpcdecode, results, tmp_path):
    made = hpcdecode("report", "r.h5", "-o", "run.html")
    assert made.returncode == 0 and made.stdout == "run.html\n" and made.stderr == ""
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    again = hpcdecode("report", "r.h5", "-o", "run.html")
    assert again.returncode == 2 and "use --overwrite to replace it" in again.stderr
    assert hpcdecode("report", "r.h5", "-o", "run.html", "--overwrite").returncode == 0
    assert hpcdecode("report", "r.h5", "-o", "none/run.HTML").returncode == 2
    assert "rank  role" in hpcdecode("report", "r.h5").stdout
