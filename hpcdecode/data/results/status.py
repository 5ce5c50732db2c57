"""What a running job says of itself in its folder of parts, once a second: read by `hpcdecode top`."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from math import isfinite
from pathlib import Path

import msgspec

from hpcdecode.data.results.lock import LOCK
from hpcdecode.data.results.segments import parts_folder

STATUS = "status.json"
EVERY_SECONDS = 1.0
_MOST_BYTES = 1 << 16
_LARGEST = 1e18  # number that is believed
_FRESH_SECONDS = 60.0  # a job of another host is taken to run if it has spoken within this time
_OWN_FRESH_SECONDS = 10.0  # the same of this host, if its process is not to be seen
_HOLDER = re.compile(r"process (\d{1,9}) on (\S+)")


class JobStatus(msgspec.Struct, kw_only=True):
    """What a job has done.

    Attributes:
        time: Now, in seconds since 1970.
        seconds: Seconds since the work of this run began.
        done: Rows that are done, those of earlier runs and those that could not be used included.
        total: All rows; None if their number is not known, or not yet.
        errors: Rows that could not be used.
        rows_per_second: Of this run.
        tokens_per_second: Of the last seconds.
        seconds_left: About how long the other rows take; None if that is not known.
        held: Tokens of the sequences in flight in the KV caches of the lead's group.
        capacity: Tokens that these hold.
        groups: Groups of ranks that have KV caches of their own.
    """

    time: float
    seconds: float
    done: int
    total: int | None
    errors: int
    rows_per_second: float
    tokens_per_second: float
    seconds_left: float | None
    held: int
    capacity: int = 0
    groups: int = 1


class StatusFile:
    """Where a job says what it has done. A disk that refuses it does not end the job.

    Args:
        output: The results file.
        capacity: As in JobStatus.
        groups: Likewise.
    """

    def __init__(self, output: Path, capacity: int, groups: int) -> None:
        self._path = parts_folder(output) / STATUS
        self._capacity, self._groups = capacity, groups

    def write(self, status: JobStatus) -> None:
        """Replace the file. It is not synced: nothing depends on it."""
        status.capacity, status.groups = self._capacity, self._groups
        temporary = self._path.with_name(STATUS + ".tmp")
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(temporary, flags, 0o666), "wb") as file:
                file.write(msgspec.json.encode(status))
            os.replace(temporary, self._path)


def read_status(output: Path) -> JobStatus | None:
    """Return what the job of a results file last said; None if it said nothing, or nothing that can be believed."""
    data = _beginning(parts_folder(output) / STATUS, _MOST_BYTES)
    try:
        status = msgspec.json.decode(data, type=JobStatus)
    except (msgspec.DecodeError, RecursionError):
        return None
    numbers = [value for value in msgspec.structs.astuple(status) if value is not None]
    return status if all(isfinite(value) and 0 <= value <= _LARGEST for value in numbers) else None


def holder(output: Path) -> str:
    """Return what the lock of a results file says of the process that writes it; an empty text if there is none."""
    return _beginning(parts_folder(output) / LOCK, 200).decode(errors="replace").strip()


def is_running(output: Path, status: JobStatus | None) -> bool:
    """Return whether the job of a results file runs, as far as its files tell. No lock is taken."""
    age = time.time() - status.time if status else float("inf")
    match = _HOLDER.fullmatch(holder(output))
    if match is None or match[2] != socket.gethostname():
        return age < _FRESH_SECONDS
    return age < _OWN_FRESH_SECONDS or _exists(int(match[1]))


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _beginning(path: Path, most: int) -> bytes:
    """Return the first bytes of a regular file; none if there is no such file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(most) if path.is_file() else b""
    except OSError:
        return b""
