"""Jobs that run for minutes: how far they have come, and how they end."""

from __future__ import annotations

import os
import signal
import time

import h5py
import psutil
import pytest

from tests.support.commands import ranks_of


def finished(path):
    """(line, generated token ids) of the rows in a results file, and whether it is complete."""
    with h5py.File(path) as file:
        ends, tokens = file["rows/token_offsets"][:], file["rows/token_ids"][:]
        rows = {
            line: tokens[a:b].tolist() for line, a, b in zip(file["rows/line"][:], ends[:-1], ends[1:], strict=True)
        }
        return rows, bool(file.attrs["complete"])


def wait_for_rows(path, process, seconds=120, more_than=0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        if path.exists() and len(finished(path)[0]) > more_than:
            return
        time.sleep(0.2)
    pytest.fail("no row was finished")


def end(process, seconds):
    """Exit code, output and seconds until the launcher and every rank are gone."""
    start, ranks = time.monotonic(), ranks_of(process)
    try:
        _, err = process.communicate(timeout=seconds)
        psutil.wait_procs(ranks, timeout=max(seconds - (time.monotonic() - start), 1))
        assert not [r for r in ranks if r.is_running() and r.status() != psutil.STATUS_ZOMBIE]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, err
