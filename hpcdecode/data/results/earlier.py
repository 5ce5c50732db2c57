"""The rows of an earlier run of a job, which its next run resumes: finished ones, and those that were in flight."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import h5py
import msgspec
import numpy as np

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.checked import open_sorted
from hpcdecode.data.results.diskfile import new_file, open_segment
from hpcdecode.data.results.layout import RAGGED
from hpcdecode.data.results.lock import Lock
from hpcdecode.data.results.merge import merge
from hpcdecode.data.results.seal import Damaged
from hpcdecode.data.results.segments import Segment, describe, missing_commits, parts_folder, segment_files
from hpcdecode.data.results.unfinished import UNFINISHED, load_unfinished
from hpcdecode.data.results.verify import verified
from hpcdecode.errors import UserError
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.system.durable import sync

DAMAGED = ".damaged"  # end of the name of a damaged segment
_BLOCK_LINES = 1 << 20  # read at once
_MAX_LINES = 1 << 36  # a file that claims more is damaged


class EarlierRun:
    """The rows of an earlier run: those committed, and those in flight at its last checkpoint.

    Args:
        path: The output.
        job: Name of the job.
        lock: The lock of the output, if this process holds it.

    Attributes:
        path: The output.
        parts: Its folder of parts.
        lock: The lock of the output, or None.
        complete: Whether nothing is left to do.
        limit: Number of rows that a complete output covers; None for all.
        rows: Number of committed rows.
        errors: Number of committed errors.
        lines: Number of different lines of both.
        segments: Live segments. There are none if the output has the rows itself, until `take_over`.
        unfinished: Sequences that were in flight, by line and sample.
        warnings: Messages about damaged or missing files.
    """

    def __init__(self, path: Path, job: str, *, lock: Lock | None = None) -> None:
        self.path, self.parts, self.lock = path, parts_folder(path), lock
        self.complete = False
        self.limit: int | None = None
        self.rows = self.errors = self.lines = 0
        self.segments: list[Segment] = []
        self.unfinished: dict[int, dict[int, Unfinished]] = {}
        self.warnings: list[str] = []
        self._job = job
        self._damaged: list[Path] = []
        self._file: os.stat_result | None = None  # of an output that is to become the first segment
        self._done = np.zeros(0, bool)  # by line

    def done(self, line: int) -> bool:
        """Return whether nothing is left to do for a row."""
        return line < len(self._done) and bool(self._done[line])

    def continued(
        self, prompts: Iterable[Prompt | RowError], vocab_size: int | None = None
    ) -> Iterator[Prompt | RowError]:
        """Yield prompts, of which those that were in flight have the tokens that they had generated.

        Args:
            prompts: Prompts, and rows that cannot be used.
            vocab_size: Size of the vocabulary; sequences with other tokens begin anew. None accepts any token.
        """
        for prompt in prompts:
            if isinstance(prompt, Prompt) and prompt.line in self.unfinished:
                found = self.unfinished[prompt.line].values()
                prompt.unfinished = [u for u in found if _belongs_to(u, prompt, vocab_size)]
            yield prompt

    def load_file(self, *, complete: bool, limit: int | None) -> None:
        """Read the lines of an output that has the rows itself.

        Args:
            complete: Whether nothing is left to do.
            limit: Number of rows that the output covers; None for all.

        Raises:
            UserError: The output is damaged, or segments have rows that it does not have.
        """
        self._file, self.complete, self.limit = os.stat(self.path), complete, limit
        with open_sorted(self.path) as file:
            self._count(file, mark=not complete)
        for leftover in [] if complete else segment_files(self.parts):
            self._require_known(leftover)

    def load_segments(self, shown: int) -> None:
        """Read the lines of the live segments, and the sequences in flight.

        Args:
            shown: Number of rows and errors that the index shows.

        Raises:
            UserError: A segment belongs to another job, or has rows of another segment.
        """
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
        try:
            self.unfinished = load_unfinished(self.parts, self._job)
        except Damaged as e:
            checkpoint = self.parts / UNFINISHED
            self.warnings.append(f"{checkpoint}: cannot be used ({e}); rows that were in flight begin anew")

    def take_over(self) -> Lock:
        """Make these rows the first rows of a new run, and return the lock of the output.

        No row is lost if the process ends at any moment.

        Raises:
            UserError: Another process has changed the output, or holds its lock.
            OSError: The disk refuses it.
        """
        self.parts.mkdir(exist_ok=True)
        lock = self.lock = self.lock or Lock(self.parts)
        try:
            if self._file is not None:
                self._make_first_segment(self._file)
            for path in self._damaged:
                path.rename(path.with_name(path.name + DAMAGED))
            self._rebase()
        except BaseException:
            lock.release()
            raise
        return lock

    def _make_first_segment(self, before: os.stat_result) -> None:
        """Link the output as the first segment, so that an index can replace it. `before` is its earlier state."""
        now = os.stat(self.path)
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
            raise UserError(f"results {self.path}: another process has changed them meanwhile; start the job again")
        for leftover in segment_files(self.parts):
            leftover.unlink()
        (self.parts / UNFINISHED).unlink(missing_ok=True)
        with open_segment(self.path) as file:
            segment = Segment.of(file, 1, 1)
        place = self.parts / segment.name
        try:
            os.link(self.path, place)
        except OSError:  # the file system has no hard links; `find_earlier` undoes the renaming if there is no index
            self.path.rename(place)
        sync(self.parts)
        if segment.extent.inputs.any:  # they are packed in segments
            self._rewrite(segment, segment.base)
            segment = describe(place)
        self.segments = [segment]

    def _rebase(self) -> None:
        """Make the offsets of each segment begin where those of the segment before end, even if some are missing."""
        base = dict.fromkeys(RAGGED, 0)
        for i, segment in enumerate(self.segments):
            if segment.base != base:
                self._rewrite(segment, base)
                self.segments[i] = segment = msgspec.structs.replace(segment, base=base)
            base = segment.end

    def _rewrite(self, segment: Segment, base: dict[str, int]) -> None:
        """Write a segment anew with another base."""
        path = self.parts / segment.name
        with new_file(path.with_name(path.name + ".tmp"), path, self._job) as (file, check):
            merge([path], file, check, base)

    def _count(self, file: h5py.File, *, mark: bool) -> None:
        """Count the rows and errors of a file, and mark their lines as done if `mark` is true."""
        self.rows += len(file["rows/line"])
        self.errors += len(file["errors/line"])
        if mark:
            before, own = self.lines, 0
            for lines in (file["rows/line"], file["errors/line"]):
                own += self._mark(lines)
            if self.lines - before != own:
                raise UserError(f"{file.filename}: expected rows of its own, got some that other segments have, too")

    def _mark(self, dataset: h5py.Dataset) -> int:
        """Mark lines as done, and return the number of different lines."""
        count, last = 0, -1
        for start in range(0, len(dataset), _BLOCK_LINES):
            lines = dataset[start : start + _BLOCK_LINES]
            if lines.min() < 0 or lines.max() > _MAX_LINES or (np.diff(lines, prepend=last) < 0).any():
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
        """Raise UserError if a segment has rows that the output does not have, since `take_over` removes it."""
        with open_segment(path) as file:
            datasets = [file[name] for name in ("rows/line", "errors/line")]
            blocks = (d[start : start + _BLOCK_LINES] for d in datasets for start in range(0, len(d), _BLOCK_LINES))
            known = [b.max() < len(self._done) and self._done[b].all() for b in blocks]
        if not all(known):
            raise UserError(
                f"results {self.path}: expected all rows of the job in it, got others in {path}; "
                "move that file or this folder away, or choose another -o"
            )


def _belongs_to(unfinished: Unfinished, prompt: Prompt, vocab_size: int | None) -> bool:
    """Return whether a row can continue with the tokens that a checkpoint has for it."""
    params, ids = prompt.params, unfinished.token_ids
    fits = 0 <= unfinished.sample < params.samples and 0 < len(ids) <= params.max_tokens
    logprobs = unfinished.logprobs
    fits = fits and (params.logprobs is None) == (logprobs is None) and (logprobs is None or len(logprobs) == len(ids))
    return fits and (vocab_size is None or all(0 <= token < vocab_size for token in ids))
