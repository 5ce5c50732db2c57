"""What an earlier run of the same job left behind, and how a later one takes it up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.checked import open_sorted
from hpcdecode.data.results.diskfile import new_file, open_segment
from hpcdecode.data.results.identity import differences
from hpcdecode.data.results.lock import Lock
from hpcdecode.data.results.merge import merge
from hpcdecode.data.results.seal import Damaged, job_name, sealed, unsealed
from hpcdecode.data.results.segments import RAGGED, Segment, missing_commits, parts_folder, segment_files
from hpcdecode.data.results.stored import StoredFile
from hpcdecode.data.results.verify import verified
from hpcdecode.errors import UserError
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.system.durable import destination, sync, write_errors, write_whole

UNFINISHED = "unfinished.msgpack"
DAMAGED = ".damaged"  # what the name of a damaged segment ends with
_STRETCH = 1 << 20  # lines read at once
_MOST_LINES = 1 << 36  # a file that claims more is damaged


class Earlier:
    """The rows of an earlier run: committed ones, and those that were in flight at its last checkpoint.

    Attributes:
        complete: nothing is left to do.
        rows, errors: counts of what is committed, and `lines`: of different lines of both.
        segments: those in force; empty where complete, and once more until `take_up` where the rows lie in a file.
        unfinished: by line and sample.
        warnings: what was damaged or missing, and what becomes of it.
    """

    def __init__(self, path: Path, job: str, *, lock: Lock | None = None) -> None:
        self.path, self.parts, self.lock = path, parts_folder(path), lock
        self.complete, self.limit = False, None
        self.rows = self.errors = self.lines = 0
        self.segments: list[Segment] = []
        self.unfinished: dict[int, dict[int, Unfinished]] = {}
        self.warnings: list[str] = []
        self._job = job
        self._damaged: list[Path] = []
        self._file: os.stat_result | None = None  # of the file whose rows are to become the first segment
        self._done = np.zeros(0, bool)  # by line

    def done(self, line: int) -> bool:
        """Whether nothing is left to do for a row."""
        return line < len(self._done) and bool(self._done[line])

    def continued(
        self, prompts: Iterable[Prompt | RowError], vocab_size: int | None = None
    ) -> Iterator[Prompt | RowError]:
        """The prompts, those that were in flight with what they had generated."""
        for prompt in prompts:
            if isinstance(prompt, Prompt) and prompt.line in self.unfinished:
                found = self.unfinished[prompt.line].values()
                prompt.unfinished = [u for u in found if _is_of(u, prompt, vocab_size)]
            yield prompt

    def take_file(self, *, complete: bool, limit: int | None) -> None:
        """Know the rows of `path`, which holds them itself. complete: nothing is left to do."""
        self._file, self.complete, self.limit = os.stat(self.path), complete, limit
        with open_sorted(self.path) as file:
            self._count(file, mark=not complete)
        for left in [] if complete else segment_files(self.parts):
            self._require_known(left)

    def take_segments(self, shown: int) -> None:
        """Know the rows of the segments in force. shown: how many of them and of errors the index shows."""
        self.segments, self._damaged = verified(self.parts, self._job)
        for segment in self.segments:
            with open_segment(self.parts / segment.name) as file:
                self._count(file, mark=True)
        found = [*(self.parts / s.name for s in self.segments), *self._damaged]
        lost = [f"{path.name} is damaged" for path in self._damaged]
        lost += [f"seg-{a:08d} to seg-{b:08d} are missing" for a, b in missing_commits(found)]
        if not lost and shown > self.rows + self.errors:
            lost = [f"{shown - self.rows - self.errors} rows that {self.path.name} shows are missing"]
        self.warnings += [f"{self.parts}: {what}; their rows are generated again" for what in lost]
        self._load_unfinished()

    def take_up(self) -> Lock:
        """Make the earlier rows those of a run that begins now; nothing is lost at whatever moment it is ended.

        Returns the lock on the output. Raises UserError if another process has changed it since, and OSError.
        """
        self.parts.mkdir(exist_ok=True)
        lock = self.lock = self.lock or Lock(self.parts)
        try:
            if self._file is not None:
                self._take_over()
            for path in self._damaged:
                path.rename(path.with_name(path.name + DAMAGED))
            self._rebase()
        except BaseException:
            lock.release()
            raise
        return lock

    def _take_over(self) -> None:
        """Make the file of all earlier rows the first segment, under a second name, until the index replaces it."""
        now = os.stat(self.path)
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (
            self._file.st_ino,
            self._file.st_size,
            self._file.st_mtime_ns,
        ):
            raise UserError(f"results {self.path}: another process has changed them meanwhile; start the job again")
        for left in segment_files(self.parts):
            left.unlink()
        (self.parts / UNFINISHED).unlink(missing_ok=True)
        with open_segment(self.path) as file:
            segment = Segment.of(file, 1, 1)
        place = self.parts / segment.name
        try:
            os.link(self.path, place)
        except (
            OSError
        ):  # a file system without hard links; `find_earlier` puts it back if the job ends before the index
            self.path.rename(place)
        sync(self.parts)
        self.segments = [segment]

    def _rebase(self) -> None:
        """Let the offsets of every segment begin where those of the one before end, though some may be missing."""
        base = dict.fromkeys(RAGGED, 0)
        for i, segment in enumerate(self.segments):
            if segment.base != base:
                path = self.parts / segment.name
                with new_file(path.with_name(path.name + ".tmp"), path, self._job) as (file, check):
                    merge([path], file, check, base)
                self.segments[i] = segment = msgspec.structs.replace(segment, base=base)
            base = segment.end

    def _count(self, file: h5py.File, *, mark: bool) -> None:
        self.rows += len(file["rows/line"])
        self.errors += len(file["errors/line"])
        if mark:
            before, own = self.lines, 0
            for lines in (file["rows/line"], file["errors/line"]):
                own += self._mark(lines)
            if self.lines - before != own:
                raise UserError(f"{file.filename}: expected rows of its own, got some that other segments have, too")

    def _mark(self, dataset: h5py.Dataset) -> int:
        """Mark lines as done; returns how many different ones there are."""
        count, last = 0, -1
        for start in range(0, len(dataset), _STRETCH):
            lines = dataset[start : start + _STRETCH]
            if lines.min() < 0 or lines.max() > _MOST_LINES or (np.diff(lines, prepend=last) < 0).any():
                raise UserError(f"{dataset.file.filename}: expected lines that ascend from 1 on, got others")
            distinct = lines[np.diff(lines, prepend=last) > 0]
            last = int(lines[-1])
            if last >= len(self._done):
                self._done = np.concatenate([self._done, np.zeros(last + 1 - len(self._done), bool)])
            self.lines += int((~self._done[distinct]).sum())
            self._done[distinct] = True
            count += len(distinct)
        return count

    def _require_known(self, path: Path) -> None:
        """Raise UserError if a segment holds rows that the file at `path` does not hold; `take_over` removes it."""
        with open_segment(path) as file:
            lines = [file[name] for name in ("rows/line", "errors/line")]
            stretches = (d[start : start + _STRETCH] for d in lines for start in range(0, len(d), _STRETCH))
            known = [s.max() < len(self._done) and self._done[s].all() for s in stretches]
        if not all(known):
            raise UserError(
                f"results {self.path}: expected all rows of the job in it, got others in {path}; "
                "move that file or this folder away, or choose another -o"
            )

    def _load_unfinished(self) -> None:
        path = self.parts / UNFINISHED
        try:
            data, job = unsealed(path)
            found = msgspec.msgpack.decode(data, type=list[Unfinished])
            if job != self._job:
                raise Damaged("it belongs to another job")
        except FileNotFoundError:
            return
        except (Damaged, msgspec.DecodeError) as e:
            self.warnings.append(f"{path}: cannot be used ({e}); rows that were in flight begin anew")
            return
        for u in found:
            self.unfinished.setdefault(u.line, {})[u.sample] = u  # a sequence's newer entry comes last, and holds


def _is_of(unfinished: Unfinished, prompt: Prompt, vocab_size: int | None) -> bool:
    """Whether a row can go on from what it is said to have generated."""
    params, ids = prompt.params, unfinished.token_ids
    fits = 0 <= unfinished.sample < params.samples and len(ids) <= params.max_tokens
    return fits and (vocab_size is None or all(0 <= token < vocab_size for token in ids))


def find_earlier(
    path: str | os.PathLike, identity: dict[str, Any], *, overwrite: bool, limit: int | None = None
) -> Earlier | None:
    """What there is to continue at the output `path`; None where the job begins anew. Changes nothing that is read.

    Args:
        identity: of the job; see identity.py.
        limit: how many rows of the prompt files the job takes, None for all. A file that is complete for fewer rows
            is continued.

    Raises:
        UserError: the output cannot be written, is in use, is damaged, or holds the rows of another job.
    """
    target = destination(path, "results ")
    with write_errors(path, "make it readable"):
        return _find(target, parts_folder(target), identity, overwrite, limit)


def _find(path: Path, parts: Path, identity: dict[str, Any], overwrite: bool, limit: int | None) -> Earlier | None:
    if path.exists() and path.stat().st_size and not h5py.is_hdf5(path):
        mend = "remove it, and it is made again from the rows in " + str(parts) if segment_files(parts) else ""
        raise UserError(
            f"results {path}: expected an HDF5 file to continue or replace, got another; {mend or 'choose another -o'}"
        )
    if overwrite or not (path.exists() or segment_files(parts)):
        return None
    lock = Lock(parts) if parts.exists() else None
    try:
        return _earlier(Earlier(path, job_name(identity), lock=lock), identity, limit)
    except BaseException:
        if lock:
            lock.release()
        raise


def _earlier(earlier: Earlier, identity: dict[str, Any], limit: int | None) -> Earlier:
    path, parts = earlier.path, earlier.parts
    _put_back(path, parts)
    try:
        stored = StoredFile(path)
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as e:
        if not segment_files(parts):
            raise UserError(
                f"results {path}: expected the results of an earlier run of this job, got: {e};"
                " use --overwrite to start anew, or choose another -o"
            ) from e
        earlier.warnings.append(f"{path}: cannot be read ({e}); it is made again from the rows in {parts}")
        earlier.take_segments(0)
        return earlier
    changed = list(differences(stored.identity, identity))
    if changed:
        raise UserError(
            f"results {path}: holds the rows of another job: {'; '.join(changed)};"
            " use --overwrite to start anew without them, or choose another -o"
        )
    if stored.holds_rows:
        earlier.take_file(complete=stored.complete and stored.covers(limit), limit=stored.limit)
    else:
        if stored.shown and not segment_files(parts):
            raise UserError(
                f"results {path}: expected its rows in {parts}, found none; move them there, use --overwrite to start "
                "anew without them, or choose another -o"
            )
        earlier.take_segments(stored.shown)
    return earlier


def _put_back(path: Path, parts: Path) -> None:
    """Undo a `take_up` that was ended when the file had its name as a segment only."""
    first = parts / "seg-00000001-00000001.h5"
    if path.exists() or not first.exists():
        return
    with suppress(OSError), open_segment(first) as file:
        if "complete" not in file.attrs:
            return
        first.rename(path)


def save_unfinished(parts: Path, sequences: list[Unfinished], job: str) -> None:
    """Replace the checkpoint of the sequences in flight, durably. Raises OSError."""
    write_whole(parts / UNFINISHED, sealed(msgspec.msgpack.encode(sequences), job))
