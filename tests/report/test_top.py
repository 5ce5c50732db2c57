"""`hpcdecode top`: what a job says of itself, what its files say, and how it looks in a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.status import STATUS, JobStatus, StatusFile, is_running, read_status
from hpcdecode.errors import UserError
from hpcdecode.report.top import bar, top
from tests.support.results_files import result, writer

SAID = JobStatus(
    time=0.0,
    seconds=63.0,
    done=1000,
    total=4000,
    errors=3,
    rows_per_second=15.25,
    tokens_per_second=4321.0,
    seconds_left=200.0,
    held=5000,
)


@pytest.fixture
def job(tmp_path):
    """A job of this process that runs: 7 rows and 3 errors are on disk, and it has said what it does."""
    out = writer(tmp_path / "o.h5")
    for line in range(1, 8):
        out.add(result(line))
    for line in (8, 9, 10):
        out.error(RowError(line, str(line), f"max_tokens: expected an integer >= 1, got {-line}\x1b[2J"))
    out.checkpoint()
    SAID.time = time.time()
    StatusFile(out.path, capacity=20_000, groups=2).write(SAID)
    yield out
    out.close(complete=False, summary={})


def snapshot(path):
    out = io.StringIO()
    top(str(path), 1, out)
    return out.getvalue()


def test_a_job_that_runs(job):
    text = snapshot(job.path)
    me = f"process {os.getpid()} on {socket.gethostname()}"
    assert text.splitlines() == [
        f"{job.path}: running for 63.0 s ({me})",
        "model    , ",
        f"rows     {bar(1, 4)}1,000 of 4,000 (25%), 3 errors; on disk 10",
        "speed    15.2 rows/s, 4,321 tokens/s, about 3 min 20 s left",
        f"KV load  {bar(1, 4)}5,000 of 20,000 tokens (25%), group 1 of 2",
        "errors by cause",
        "       3 max_tokens: expected an integer >= 1, got -8\\x1b[2J (line 8)",
    ]
    SAID.time, SAID.total, SAID.seconds_left = time.time() - 30, None, None
    StatusFile(job.path, 0, 1).write(SAID)
    text = snapshot(job.path)
    assert "rows     1,000, 3 errors; on disk 10\n" in text and "KV load" not in text and "left" not in text
    assert re.search(r"nothing new for 3\d\.\d s", text)


def test_a_job_that_has_ended(job, tmp_path):
    job.close(complete=False, summary={})
    assert not (tmp_path / "o.h5.parts" / STATUS).exists()
    (tmp_path / "o.h5.parts" / "lock").write_text(f"process 999999999 on {socket.gethostname()}\n")
    first, rows, *_ = snapshot(job.path).splitlines()
    assert first.endswith("o.h5: not running; the same command goes on") and rows.endswith("10, 3 errors; on disk 10")
    done = writer(tmp_path / "whole.h5")
    done.add(result(1), result(1, 1))
    StatusFile(done.path, 1, 1).write(SAID)
    done.close(complete=True, summary={})
    assert not (tmp_path / "whole.h5.parts").exists()
    assert snapshot(done.path) == f"{done.path}: complete\nrows     {bar(1, 1)}1 of 1 (100%); on disk 1\n"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"time": "now"}', b"\xff" * 70_000, b"[" * 60_000, None, "link", "pipe"],
    ids=["empty", "cut", "list", "text", "long", "deep", "numbers", "link", "pipe"],
)
def test_what_cannot_be_believed_is_not_shown(job, tmp_path, data):
    place = tmp_path / "o.h5.parts" / STATUS
    content = place.read_bytes()
    place.unlink()
    if data == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        place.symlink_to(tmp_path / "elsewhere")
    elif data == "pipe":
        os.mkfifo(place)
    else:
        place.write_bytes(content.replace(b"5000", b"-5000") if data is None else data)
    assert read_status(job.path) is None
    assert "rows     7" not in snapshot(job.path) and "rows     10, 3 errors; on disk 10" in snapshot(job.path)


def test_a_job_of_another_host_is_known_by_what_it_said_last(job, tmp_path):
    (tmp_path / "o.h5.parts" / "lock").write_text("process 1 on another-host\n")
    assert is_running(job.path, read_status(job.path))
    SAID.time = time.time() - 100
    assert not is_running(job.path, SAID) and not is_running(job.path, None)


def test_a_disk_that_refuses_does_not_end_the_job(tmp_path):
    StatusFile(tmp_path / "no folder" / "o.h5", 1, 1).write(SAID)
    with pytest.raises(UserError, match="expected a results file"):
        snapshot(tmp_path / "none.h5")


class Terminal:
    """`hpcdecode ARGS` in a terminal of 80 columns: what it wrote, keys, and its end."""

    def __init__(self, *arguments, folder):
        self.own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        line = [sys.executable, "-m", "hpcdecode", *arguments]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), other)
        self.process = subprocess.Popen(line, cwd=folder, start_new_session=True, **streams)
        os.close(other)
        self.text = ""

    def read(self, until="", seconds=60):
        """Read until a text comes, or the process has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until and until in self.text):
            try:
                self.text += os.read(self.own, 65536).decode(errors="replace")
            except OSError:  # its last process has ended
                break
        assert until in self.text, self.text
        return self.text

    def end(self):
        self.read()
        os.close(self.own)
        return self.process.wait(timeout=30)


@pytest.mark.system
@pytest.mark.parametrize("leave", ["q", "interrupt"])
def test_it_goes_on_until_it_is_left(job, tmp_path, leave):
    terminal = Terminal("top", "o.h5", "-n", "0.1", folder=tmp_path)
    terminal.read("\x1b[J\x1b[")  # the second view goes over the first
    if leave == "q":
        os.write(terminal.own, b"q")
    else:
        terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0 and "Traceback" not in terminal.text
    assert "\x1b[2J" not in terminal.text  # of the rows' own text
    assert max(map(len, re.sub(r"\x1b\[\d*[A-Z]", "", terminal.text).split("\r\n"))) < 80


@pytest.mark.system
def test_a_real_job_from_its_begin_to_its_end(hpcdecode, tmp_path):
    rows = [{"prompt": f"Line {n}", "max_tokens": 200} for n in range(160)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n")
    command = ("generate", "p.jsonl", "-q", "--model", "demo", "--ignore-eos", "--batch", 16, "--checkpoint-every", 0.3)
    status, end = tmp_path / "p.h5.parts" / STATUS, time.monotonic() + 60
    with ThreadPoolExecutor() as pool:
        job = pool.submit(hpcdecode, *command)
        while not status.exists() and time.monotonic() < end:
            assert not job.done(), job.result()
            time.sleep(0.05)
        terminal = Terminal("top", "p.h5", "-n", "0.2", folder=tmp_path)
        terminal.read(" of 161 (")
        text = terminal.text if job.done() else snapshot(tmp_path / "p.h5")
        assert job.result().returncode == 3
    assert terminal.end() == 0
    assert re.search(r"p\.h5: running for .* \(process \d+ on ", terminal.text)
    for what in ("model    model, ", "rows     [", "rows/s, ", "KV load  [", "ranks    one rank of both roles on 1 h"):
        assert what in text, text
    shown = [int(n.replace(",", "")) for n in re.findall(r"rows     \[[#-]+\] ([\d,]+)", terminal.text)]
    assert shown == sorted(shown) and len(set(shown)) > 2 and shown[-1] == 161
    assert "p.h5: complete" in terminal.text and "expected a JSON object on one line" in terminal.text
