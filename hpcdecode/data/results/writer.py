"""Writes the results of a job: commits rows every few seconds while it runs, and sorts them into one file at its end.

While the job runs, OUT.h5 is a small index over the segments in OUT.h5.parts/. Each commit replaces it as a whole, so
that h5py can open it at any moment; it shows the rows in the order of their commits. See layout.py for the datasets,
and segments.py for the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcdecode.data.prompts.kept import KeptColumns
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.diskfile import new_file
from hpcdecode.data.results.earlier import DAMAGED, EarlierRun
from hpcdecode.data.results.identity import job_name
from hpcdecode.data.results.layout import FINISH_REASONS, RAGGED, write_attributes
from hpcdecode.data.results.lock import LOCK, Lock
from hpcdecode.data.results.merge import merge
from hpcdecode.data.results.result import BYTES_PER_VALUE, Result, table_of
from hpcdecode.data.results.rowless import is_rowless
from hpcdecode.data.results.segments import (
    FAN_IN,
    Segment,
    index_image,
    joined,
    parts_folder,
    segment_files,
    segment_image,
)
from hpcdecode.data.results.status import STATUS
from hpcdecode.data.results.unfinished import UNFINISHED, save_unfinished
from hpcdecode.errors import InvariantViolation, UserError
from hpcdecode.requests.prompt import Unfinished
from hpcdecode.system.durable import destination, write_errors, write_whole

SEGMENT_TOKENS = 1 << 20  # a commit is due after so many tokens
MERGE_ROWS = 1 << 18  # before the end, no merge makes a segment of more rows than this or 1/32 of all rows
COST_SHARE = 1 / 30  # of the time at most is spent on commits that are due by time, and as much on index files
READER_SECONDS = 60.0  # merged segments are kept so long for readers that have opened the index before


class ResultsWriter:
    """Writes one output; used by one thread.

    Args:
        path: The output file; its directory must exist.
        attributes: Root attributes, which are stored as JSON text.
        earlier: The run to resume; None to begin anew.
        checkpoint_seconds: A commit is due after this time.
        segment_rows: A commit is due after so many rows, if that is earlier.
        overwrite: Whether a run that begins anew replaces rows that an earlier one has left.
        kept: Has the input columns of rows; None for rows without any.

    Attributes:
        path: The output file, with links followed.
        error_count: Number of rows that could not be used so far.
        sample_count: Number of finished samples so far.
        unfinished: Returns the sequences in flight, which are saved with each commit that is due by time.

    Raises:
        UserError: The output cannot be written. All methods raise it if the disk refuses a write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        attributes: dict[str, Any],
        earlier: EarlierRun | None = None,
        checkpoint_seconds: float = 5.0,
        segment_rows: int = 4096,
        overwrite: bool = True,
        kept: KeptColumns | None = None,
    ) -> None:
        self.path = destination(path, "results ")
        self.error_count = earlier.errors if earlier else 0
        self.sample_count = earlier.rows if earlier else 0
        self.unfinished: Callable[[], list[Unfinished]] = list
        self._parts = parts_folder(self.path)
        self._attributes = {"summary": {}, **attributes}
        self._checkpoint_seconds, self._segment_rows = checkpoint_seconds, segment_rows
        self._kept = kept
        self._rows: list[Result] = []  # not committed yet, as the next two
        self._errors: list[RowError] = []
        self._pending_tokens = 0
        self._job = job_name(attributes.get("identity"))
        self._earlier_lines = earlier.lines if earlier else 0
        # Sequences of the earlier run that are not finished yet, by line and sample.
        self._left = dict(earlier.unfinished) if earlier else {}
        self._saved = bool(self._left)
        self._superseded: list[Path] = []  # merged segments that the index on disk still refers to
        self._retired: list[tuple[float, Path]] = []  # merged segments, and the time from which they may be removed
        self._index_stale = self._closed = False
        self._commit_due = self._index_due = time.monotonic() + checkpoint_seconds
        with write_errors(self.path, "make it writable"):
            self._lock = earlier.take_over() if earlier else _claim(self.path, self._parts, overwrite)
            self._segments: list[Segment] = list(earlier.segments) if earlier else []
            self._commits = self._segments[-1].last if self._segments else 0
            try:
                self._write_index()
            except OSError:
                self._lock.release()
                raise

    def add(self, *samples: Result) -> None:
        """Add a finished row with all its samples. The next commit makes them durable together."""
        self.sample_count += len(samples)
        columns = self._kept.take(samples[0].line) if self._kept else b""
        for result in samples:
            if result.finish_reason not in FINISH_REASONS:
                raise ValueError(f"finish_reason: expected one of {list(FINISH_REASONS)}, got {result.finish_reason!r}")
            ids = np.asarray(result.token_ids, dtype=np.int32)
            result = msgspec.structs.replace(result, token_ids=ids, columns=columns)
            self._rows.append(result)
            self._left.pop(result.line, None)
            self._pending_tokens += result.weight
        self.tick()

    def error(self, e: RowError) -> None:
        """Add a row that could not be used."""
        columns = self._kept.take(e.line) if self._kept else b""
        self._errors.append(msgspec.structs.replace(e, columns=columns))
        self._pending_tokens += len(columns) // BYTES_PER_VALUE
        self.error_count += 1
        self.tick()

    def tick(self) -> None:
        """Commit if a commit is due. This costs little if none is."""
        pending = len(self._rows) + len(self._errors)
        now = time.monotonic()
        full = pending >= self._segment_rows or self._pending_tokens >= SEGMENT_TOKENS
        due = now >= self._commit_due
        if not (full or due) and not (self._index_stale and now >= self._index_due):
            return
        with write_errors(self.path):
            if full or due:
                self._commit(unfinished=due)
                self._compact()
            if self._index_stale and time.monotonic() >= self._index_due:
                self._write_index()

    def checkpoint(self) -> None:
        """Commit all rows and errors added so far, update the index, and save the sequences in flight."""
        with write_errors(self.path):
            self._commit(unfinished=True)
            if self._index_stale:
                self._write_index()

    def close(self, *, complete: bool, summary: dict[str, Any], rows_read: int | None = None) -> None:
        """Finish the output; a second call does nothing.

        Args:
            complete: Whether the job is complete. If so, all rows are merged into one file, sorted by line, and the
                folder of parts is removed. Else the rows added so far are committed.
            summary: The root attribute `summary`.
            rows_read: Number of rows that this run had to do; None if it is not known.

        Raises:
            InvariantViolation: Not all of them would be in the final file, which is not written then.
        """
        if self._closed:
            return
        self._attributes["summary"] = summary
        with write_errors(self.path):
            self._commit(unfinished=not complete)
            if complete:
                self._write_final(None if rows_read is None else self._earlier_lines + rows_read)
            else:
                self._write_index()
                (self._parts / STATUS).unlink(missing_ok=True)
        self._lock.release()
        self._closed = True

    def abandon(self) -> None:
        """Write no more, and let another writer go on with what is committed."""
        self._lock.release()
        self._closed = True

    def _commit(self, *, unfinished: bool) -> None:
        """Write the rows added since the last commit, and the sequences in flight if `unfinished` is true."""
        start = time.monotonic()
        if self._rows or self._errors:
            self._commit_segment()
        if unfinished:
            left = [sequence for samples in self._left.values() for sequence in samples.values()]
            sequences = left + self.unfinished()  # of several entries of a sequence, the last one counts
            if sequences or self._saved:
                save_unfinished(self._parts, sequences, self._job)
            self._saved = bool(sequences)
        self._commit_due = _due(start, self._checkpoint_seconds)

    def _commit_segment(self) -> None:
        """Write the rows added since the last commit as a segment.

        An interruption at any moment leaves them either pending or committed.
        """
        table, last = table_of(self._rows, self._errors), self._segments[-1] if self._segments else None
        number, base = self._commits + 1, last.end if last else dict.fromkeys(RAGGED, 0)
        segment = Segment(number, number, 0, table.extent(), base)
        write_whole(self._parts / segment.name, segment_image(table, base, self._job))
        segments = [*self._segments, segment]
        self._segments, self._commits, self._rows, self._errors, self._pending_tokens = segments, number, [], [], 0
        self._index_stale = True

    def _compact(self) -> None:
        """Merge the newest segments while FAN_IN of them have one level, so that their number stays bounded."""
        limit = max(MERGE_ROWS, sum(s.weight for s in self._segments) // 32)
        while len(newest := self._segments[-FAN_IN:]) == FAN_IN and newest[0].level == newest[-1].level:
            whole = joined(newest)
            if whole.weight > limit:
                return
            paths = [self._parts / s.name for s in newest]
            temporary = self._parts / (whole.name + ".tmp")
            with new_file(temporary, self._parts / whole.name, self._job) as (file, check):
                merge(paths, file, check, whole.base)
            self._segments = [*self._segments[:-FAN_IN], whole]
            self._superseded += paths
            self._index_stale = True

    def _write_index(self) -> None:
        """Replace the index, and remove merged segments that no reader needs any more."""
        start = time.monotonic()
        write_whole(self.path, index_image(self._segments, self._parts.name, self._attributes))
        self._index_stale = False
        self._index_due = _due(start, 0.0)
        self._retired += [(start + READER_SECONDS, path) for path in self._superseded]
        self._superseded = []
        while self._retired and self._retired[0][0] < start:
            self._retired.pop(0)[1].unlink(missing_ok=True)

    def _write_final(self, lines: int | None) -> None:
        """Write the final file, and remove the parts. `lines` is the number of lines that it must have."""
        with new_file(self._parts / "final.tmp", self.path) as (file, check):
            written = merge([self._parts / s.name for s in self._segments], file, check)
            if lines not in (None, written):
                raise InvariantViolation(
                    "every row that was read is in the results", f"expected {lines} rows and errors, got {written}"
                )
            write_attributes(file, self._attributes, complete=True)
        with suppress(OSError):  # the results are whole; network file systems keep files that readers have open
            _remove_parts(self._parts)


def _due(start: float, seconds: float) -> float:
    """Return when to repeat work that began at `start` and ends now, so that it takes at most COST_SHARE of the time.

    It is repeated no earlier than `seconds` after its start.
    """
    now = time.monotonic()
    return max(start + seconds, now + (now - start) / COST_SHARE)


def _claim(path: Path, parts: Path, overwrite: bool) -> Lock:
    """Remove the files of an earlier run, create the folder of parts, and return its lock.

    Raises:
        UserError: Another process writes the output, or `overwrite` is false and there are rows.
        OSError: The disk refuses it.
    """
    lock = Lock(parts) if parts.exists() else None
    if not overwrite and (path.exists() or segment_files(parts)) and not is_rowless(path, parts):
        raise UserError(f"results {path}: another job has written them meanwhile; start this one again")
    if lock:
        _remove_parts(parts)
    path.unlink(missing_ok=True)
    parts.mkdir()
    return Lock(parts)


def _remove_parts(parts: Path) -> None:
    """Remove the files of this package in a folder of parts, then the folder.

    Raises:
        OSError: There are other files in it, or the disk refuses it.
    """
    others = [file for pattern in ("*.tmp", f"*{DAMAGED}", UNFINISHED, STATUS, LOCK) for file in parts.glob(pattern)]
    for file in (*segment_files(parts), *others):
        file.unlink()
    parts.rmdir()
