"""What an earlier run of the same job left behind, and how a later one takes it up."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from hpcdecode.data.diskfile import open_segment
from hpcdecode.data.durable import write_errors, write_whole
from hpcdecode.data.identity import differences
from hpcdecode.data.prompts import RowError
from hpcdecode.data.segments import Segment, parts_folder, segments_in
from hpcdecode.data.tokens import Prompt, Unfinished
from hpcdecode.errors import UserError

UNFINISHED = "unfinished.msgpack"
LOCK = "lock"


class Earlier:
    """The rows of an earlier run: committed ones, and those that were in flight at its last checkpoint.

    complete: nothing is left to do. rows, errors: counts of what is committed. segments: empty where complete.
    """

    def __init__(self, path: Path, *, complete: bool, lock: Lock | None = None) -> None:
        self.complete, self.lock = complete, lock
        self.segments: list[Segment] = [] if complete else segments_in(parts_folder(path))
        self._done = np.zeros(0, bool)  # by line
        self.unfinished: dict[int, dict[int, Unfinished]] = {}  # by line and sample
        self.rows = self.errors = 0
        for file_path in [path] if complete else [parts_folder(path) / s.name for s in self.segments]:
            with open_segment(file_path) as file:
                self.rows += len(file["rows/line"])
                self.errors += len(file["errors/line"])
                if not complete:
                    self._mark(file["rows/line"][:])
                    self._mark(file["errors/line"][:])
        if not complete:
            for u in _load_unfinished(parts_folder(path)):
                self.unfinished.setdefault(u.line, {})[u.sample] = u  # a sequence's newer entry comes last, and holds

    def done(self, line: int) -> bool:
        """Whether nothing is left to do for a row."""
        return line < len(self._done) and bool(self._done[line])

    def continued(self, prompts: Iterable[Prompt | RowError]) -> Iterator[Prompt | RowError]:
        """The prompts, those that were in flight with what they had generated."""
        for prompt in prompts:
            if isinstance(prompt, Prompt) and prompt.line in self.unfinished:
                prompt.unfinished = list(self.unfinished[prompt.line].values())
            yield prompt

    def _mark(self, lines: np.ndarray) -> None:
        if len(lines):
            size = max(len(self._done), int(lines.max()) + 1)
            self._done = np.concatenate([self._done, np.zeros(size - len(self._done), bool)])
            self._done[lines] = True


def find_earlier(path: str | os.PathLike, identity: dict[str, Any], *, overwrite: bool) -> Earlier | None:
    """What there is to continue at the output `path`; None where the job begins anew. Changes nothing.

    Raises UserError where the output cannot be written, is in use, or holds the rows of another job.
    """
    path = Path(path)
    with write_errors(path, "make it readable"):
        return _find(path, parts_folder(path), identity, overwrite)


def _find(path: Path, parts: Path, identity: dict[str, Any], overwrite: bool) -> Earlier | None:
    if not path.parent.is_dir():
        raise UserError(f"results {path}: expected an existing directory {path.parent}, found none; create it")
    if path.is_dir():
        raise UserError(f"results {path}: expected a file name, got a directory; choose another -o")
    if path.exists() and path.stat().st_size and not h5py.is_hdf5(path):
        raise UserError(f"results {path}: expected an HDF5 file to continue or replace, got another; choose another -o")
    if overwrite or not (path.exists() or (parts.exists() and segments_in(parts))):
        return None
    lock = Lock(parts) if parts.exists() else None
    complete, before = _stored_identity(path)
    changed = list(differences(before, identity))
    if changed:
        raise UserError(
            f"results {path}: holds the rows of another job: {'; '.join(changed)};"
            " use --overwrite to start anew without them, or choose another -o"
        )
    return Earlier(path, complete=complete, lock=lock)


def save_unfinished(parts: Path, sequences: list[Unfinished]) -> None:
    """Replace the checkpoint of the sequences in flight, durably. Raises OSError."""
    write_whole(parts / UNFINISHED, msgspec.msgpack.encode(sequences))


def _load_unfinished(parts: Path) -> list[Unfinished]:
    try:
        return msgspec.msgpack.decode((parts / UNFINISHED).read_bytes(), type=list[Unfinished])
    except (FileNotFoundError, msgspec.DecodeError):
        return []


def _stored_identity(path: Path) -> tuple[bool, dict[str, Any]]:
    try:
        with open_segment(path) as file:
            return bool(file.attrs["complete"]), msgspec.json.decode(file.attrs["identity"])
    except (OSError, KeyError) as e:
        raise UserError(
            f"results {path}: expected the results of an earlier run of this job, got: {e};"
            " use --overwrite to start anew, or choose another -o"
        ) from e


class Lock:
    """Held by the one process that writes an output, as long as it lives. No lock where the file system has none.

    Raises UserError where another process holds it.
    """

    def __init__(self, parts: Path) -> None:
        self._descriptor = os.open(parts / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            if e.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(
                    f"results {parts.with_suffix('')}: another job writes them ({holder}); wait for its end or"
                    " choose another -o"
                ) from e
            self._descriptor = -1
        else:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
