"""The HDF5 output: durable every few seconds while the job runs, one sorted file at its end.

While the job runs, OUT.h5 is a small index over the segments in OUT.h5.parts/ and is replaced as a whole at every
commit: plain h5py opens it at any moment, and shows the rows in the order of their commits. See layout.py for the
datasets, segments.py for the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcdecode.data.diskfile import new_file
from hpcdecode.data.durable import write_errors, write_whole
from hpcdecode.data.layout import FINISH_REASONS, PROMPTS, RAGGED, TOKENS, Table, objects, utf8, write_attributes
from hpcdecode.data.logprobs import Logprobs, columns_of
from hpcdecode.data.merge import merge
from hpcdecode.data.prompts import RowError
from hpcdecode.data.resume import LOCK, UNFINISHED, Earlier, Lock, save_unfinished
from hpcdecode.data.segments import (
    FAN_IN,
    SEGMENT_PATTERN,
    Segment,
    index_image,
    joined,
    parts_folder,
    segment_image,
)
from hpcdecode.data.tokens import Unfinished

SEGMENT_TOKENS = 1 << 20  # a commit is due at so many tokens, however few rows they are
MERGE_ROWS = 1 << 18  # no merge beyond this before the end, or beyond 1/32 of all rows so far
COST_SHARE = 1 / 30  # of the time, at most, for each of: commits by time, index files
READER_SECONDS = 60.0  # merged segments stay that long for readers that opened the index before


class Result(msgspec.Struct):
    """One finished sequence."""

    line: int  # 1-based line of the prompt file
    id: str
    sample: int
    text: str
    finish_reason: str  # stop | length
    prompt_tokens: int  # count
    token_ids: list[int]  # generated
    queued_at: float = 0.0  # Unix times: prefill began, first and last token came
    first_token_at: float = 0.0
    finished_at: float = 0.0
    logprobs: Logprobs | None = None  # of token_ids
    cumulative_logprob: float = nan
    prompt_token_ids: list[int] = []  # where it has the next
    prompt_logprobs: Logprobs | None = None

    @property
    def weight(self) -> int:
        """Tokens, each as often as numbers are kept of it."""
        held = [x for x in (self.logprobs, self.prompt_logprobs) if x is not None]
        return len(self.token_ids) + sum(len(x) * (1 + 2 * x.width) for x in held)


class ResultsWriter:
    """Writes one output; used by one thread.

    path: the output file; its directory must exist. attributes: root attributes, stored as JSON strings.
    earlier: the run to continue; None begins anew, in place of whatever is there. unfinished: gives the sequences in
    flight, which are saved with every commit that is due by time. checkpoint_seconds, segment_rows: a commit is due
    after so much time or so many rows, whichever comes first. error_count: rows that could not be used so far.
    Raises UserError where the output cannot be written; add, error, tick, checkpoint and close raise it where the
    disk refuses (full, quota, gone).
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        attributes: dict[str, Any],
        earlier: Earlier | None = None,
        checkpoint_seconds: float = 5.0,
        segment_rows: int = 4096,
    ) -> None:
        self.path = Path(path)
        self.error_count = earlier.errors if earlier else 0
        self.unfinished: Callable[[], list[Unfinished]] = list
        self._parts = parts_folder(self.path)
        self._attributes = {"summary": {}, **attributes}
        self._checkpoint_seconds, self._segment_rows = checkpoint_seconds, segment_rows
        self._rows: list[Result] = []  # not committed yet, like the two below
        self._errors: list[RowError] = []
        self._pending_tokens = 0
        self._segments: list[Segment] = list(earlier.segments) if earlier else []
        self._commits = self._segments[-1].last if self._segments else 0
        self._left = dict(earlier.unfinished) if earlier else {}  # of the earlier run, by line: not finished yet
        self._saved = bool(self._left)
        self._superseded: list[Path] = []  # merged segments that the index on disk still names
        self._retired: list[tuple[float, Path]] = []  # when it may go, merged segment
        self._index_stale = self._closed = False
        self._commit_due = self._index_due = time.monotonic() + checkpoint_seconds
        with write_errors(self.path, "make it writable"):
            self._lock = (earlier and earlier.lock) or _claim(self.path, self._parts)
            self._write_index()

    def add(self, *samples: Result) -> None:
        """Take a finished row, all its samples; they become durable together, with the next commit."""
        for result in samples:
            if result.finish_reason not in FINISH_REASONS:
                raise ValueError(f"finish_reason: expected one of {list(FINISH_REASONS)}, got {result.finish_reason!r}")
            result = msgspec.structs.replace(result, token_ids=np.asarray(result.token_ids, dtype=np.int32))
            self._rows.append(result)
            self._left.pop(result.line, None)
            self._pending_tokens += result.weight
        self.tick()

    def error(self, e: RowError) -> None:
        """Take a row that could not be used."""
        self._errors.append(e)
        self.error_count += 1
        self.tick()

    def tick(self) -> None:
        """Commit if it is time; cheap if it is not."""
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
        """Make durable, and visible in the index, what was added; and save the sequences in flight."""
        with write_errors(self.path):
            self._commit(unfinished=True)
            if self._index_stale:
                self._write_index()

    def close(self, *, complete: bool, summary: dict[str, Any]) -> None:
        """End the output; a second call does nothing.

        complete: merge all rows into one file sorted by line, put it at `path` and remove the parts. Else (the job
        was interrupted) commit what was added and leave index and parts as they are.
        """
        if self._closed:
            return
        self._attributes["summary"] = summary
        with write_errors(self.path):
            self._commit(unfinished=not complete)
            if complete:
                self._write_final()
            else:
                self._write_index()
        self._lock.release()
        self._closed = True

    def _commit(self, *, unfinished: bool) -> None:
        """Write what is pending, and then the sequences in flight."""
        start = time.monotonic()
        if self._rows or self._errors:
            self._commit_segment()
        if unfinished:
            left = [sequence for samples in self._left.values() for sequence in samples.values()]
            sequences = left + self.unfinished()  # a sequence's newer entry comes last, and holds
            if sequences or self._saved:
                save_unfinished(self._parts, sequences)
            self._saved = bool(sequences)
        self._commit_due = _due(start, self._checkpoint_seconds)

    def _commit_segment(self) -> None:
        """Write what is pending as a segment. An interruption at any point leaves it pending or committed, not both."""
        table, last = _table(self._rows, self._errors), self._segments[-1] if self._segments else None
        number, base = self._commits + 1, last.end if last else dict.fromkeys(RAGGED, 0)
        segment = Segment(number, number, 0, table.extent(), base)
        write_whole(self._parts / segment.name, segment_image(table, base))
        segments = [*self._segments, segment]
        self._segments, self._commits, self._rows, self._errors, self._pending_tokens = segments, number, [], [], 0
        self._index_stale = True

    def _compact(self) -> None:
        """Merge the newest segments while FAN_IN of them are of one level: the number of segments stays bounded."""
        limit = max(MERGE_ROWS, sum(s.weight for s in self._segments) // 32)
        while len(newest := self._segments[-FAN_IN:]) == FAN_IN and newest[0].level == newest[-1].level:
            whole = joined(newest)
            if whole.weight > limit:
                return
            paths = [self._parts / s.name for s in newest]
            temporary = self._parts / (whole.name + ".tmp")
            with new_file(temporary, self._parts / whole.name) as (file, check):
                merge(paths, file, check, whole.base)
            self._segments = [*self._segments[:-FAN_IN], whole]
            self._superseded += paths
            self._index_stale = True

    def _write_index(self) -> None:
        start = time.monotonic()
        write_whole(self.path, index_image(self._segments, self._parts.name, self._attributes))
        self._index_stale = False
        self._index_due = _due(start, 0.0)
        self._retired += [(start + READER_SECONDS, path) for path in self._superseded]
        self._superseded = []
        while self._retired and self._retired[0][0] < start:
            self._retired.pop(0)[1].unlink(missing_ok=True)

    def _write_final(self) -> None:
        with new_file(self._parts / "final.tmp", self.path) as (file, check):
            merge([self._parts / s.name for s in self._segments], file, check)
            write_attributes(file, self._attributes, complete=True)
        with suppress(OSError):  # the result is whole; network file systems keep names that readers have open
            _remove_parts(self._parts)


def _due(start: float, seconds: float) -> float:
    """When to do again what was begun at `start` and ends now, so that it takes no more than its share of the time."""
    now = time.monotonic()
    return max(start + seconds, now + (now - start) / COST_SHARE)


def _table(rows: list[Result], errors: list[RowError]) -> Table:
    rows = sorted(rows, key=lambda r: (r.line, r.sample))
    errors = sorted(errors, key=lambda e: e.line)
    generated = [(len(r.token_ids), r.logprobs) for r in rows]
    prompts = [(len(r.prompt_token_ids), r.prompt_logprobs) for r in rows]
    table = Table(
        rows={
            "line": np.array([r.line for r in rows], np.int64),
            "id": objects([utf8(r.id) for r in rows]),
            "sample": np.array([r.sample for r in rows], np.int32),
            "text": objects([utf8(r.text) for r in rows]),
            "finish_reason": np.array([FINISH_REASONS[r.finish_reason] for r in rows], np.uint8),
            "prompt_tokens": np.array([r.prompt_tokens for r in rows], np.int32),
            "queued_at": np.array([r.queued_at for r in rows], np.float64),
            "first_token_at": np.array([r.first_token_at for r in rows], np.float64),
            "finished_at": np.array([r.finished_at for r in rows], np.float64),
        },
        lengths={
            name: np.array([n for n, _ in of], np.int64) for name, of in ((TOKENS, generated), (PROMPTS, prompts))
        },
        entries={
            "token_ids": np.concatenate([np.empty(0, np.int32), *(r.token_ids for r in rows)]),
            **columns_of(generated, "logprobs", "top_token_ids", "top_logprobs"),
            **columns_of(prompts, "prompt_logprobs", "prompt_top_token_ids", "prompt_top_logprobs"),
        },
        errors={
            "line": np.array([e.line for e in errors], np.int64),
            "id": objects([utf8(e.id) for e in errors]),
            "reason": objects([utf8(e.reason) for e in errors]),
        },
    )
    sums = np.array([r.cumulative_logprob for r in rows], np.float64)
    if not np.isnan(sums).all():
        table.rows["cumulative_logprob"] = sums
    if "prompt_logprobs" in table.entries:
        table.entries["prompt_token_ids"] = np.array([i for r in rows for i in r.prompt_token_ids], np.int32)
    return table


def _claim(path: Path, parts: Path) -> Lock:
    """Remove what an earlier run left, unless one is at work there, and begin anew. Raises UserError and OSError."""
    if parts.exists():
        Lock(parts)
        _remove_parts(parts)
    path.unlink(missing_ok=True)
    parts.mkdir()
    return Lock(parts)


def _remove_parts(parts: Path) -> None:
    """Remove the files that this module writes, then the folder; raises OSError if anything else lies in it."""
    for pattern in (SEGMENT_PATTERN, "*.tmp", UNFINISHED, LOCK):
        for file in parts.glob(pattern):
            file.unlink()
    parts.rmdir()
