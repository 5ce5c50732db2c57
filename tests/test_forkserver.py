"""A command that is forked from the server is the command that a new process runs."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.commands import Command


@pytest.mark.parametrize("arguments", [["--version"], ["show", "missing.h5"], ["show", "--no-such-flag"]])
def test_a_forked_command_says_what_a_new_process_says(hpcdecode, tmp_path, arguments):
    forked, new = hpcdecode(*arguments), Command(tmp_path)(*arguments)
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)
    assert forked.stdout or forked.stderr


def test_a_command_with_a_library_of_other_settings_is_a_new_process(hpcdecode, monkeypatch):
    hpcdecode.environment["OMP_NUM_THREADS"] = "1"
    assert hpcdecode("--version").returncode == 0


def test_a_command_that_does_not_end_is_killed(forkserver, tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    line = ["generate", "rows.jsonl", "--model", "demo"]
    with pytest.raises(subprocess.TimeoutExpired):
        forkserver.run(line, tmp_path, {**forkserver.environment, "MARK": str(tmp_path)}, 1)
    end = time.monotonic() + 20
    while any(str(tmp_path) in folder for folder in folders()) and time.monotonic() < end:
        time.sleep(0.1)
    assert str(tmp_path) not in folders()


def folders() -> set[str]:
    """Return the working directories of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "cwd"))
        except OSError:
            continue
    return found
