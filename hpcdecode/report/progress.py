"""Progress of a job: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter, time

from tqdm import tqdm

from hpcdecode.data.results.status import EVERY_SECONDS, JobStatus, StatusFile

_FIRST_SECONDS, _LINE_SECONDS = 1.0, 30.0  # between lines: as many as the job has run, within these bounds
_BAR_SECONDS = 0.2
_RATE_SECONDS = 5.0  # shortest time for a rate: steps with prompts take seconds and yield few tokens
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} rows [{elapsed}, {rate_fmt}{postfix}]"
logger = logging.getLogger(__name__)


class Progress:
    """Shows progress: ask `due` regularly, and call `update` if it is.

    Args:
        bar: Show a bar rather than lines; None shows it on a terminal. Nothing is shown if INFO messages are off,
            unless this is True.
        total: Number of rows; None if it is not known.
        status: Is written, too; None for no such file.
    """

    def __init__(self, *, bar: bool | None = None, total: int | None = None, status: StatusFile | None = None) -> None:
        self._status, self._written = status, 0.0
        self._lines = logger.isEnabledFor(logging.INFO)
        self._terminal = self._lines and sys.stderr.isatty() if bar is None else bar
        columns = shutil.get_terminal_size().columns
        self._bar = tqdm(total=total, unit=" rows", disable=not self._terminal, file=sys.stderr, ncols=columns)
        self._start = self._last = self._since = perf_counter()
        self._rate, self._tokens = 0.0, 0  # tokens a second, and the tokens at `_since`
        self._before = 0
        self._total: Callable[[], int | None] = partial(_known, total)

    def expect(self, before: int, total: Callable[[], int | None]) -> None:
        """Say what the job has.

        Args:
            before: Rows that an earlier run has done.
            total: Returns the number of all rows, or None if it is not known, or not yet.
        """
        self._before, self._total = before, total
        self._bar.initial = self._bar.n = before

    def due(self) -> bool:
        """Return whether it is time for an update."""
        now = perf_counter()
        return self._shows(now) or self._writes(now)

    def _writes(self, now: float) -> bool:
        return self._status is not None and now - self._written >= EVERY_SECONDS

    def _shows(self, now: float) -> bool:
        if not (self._terminal or self._lines):
            return False
        most = min(max(self._last - self._start, _FIRST_SECONDS), _LINE_SECONDS)
        return now - self._last >= (_BAR_SECONDS if self._terminal else most)

    def restart(self) -> None:
        """Count tokens from 0 again."""
        self._tokens = 0

    def update(self, rows: int, tokens: int, in_flight: int, finished: tuple[int, int] = (0, 0)) -> None:
        """Show the progress.

        Args:
            rows: Rows that this run has done.
            tokens: Tokens generated so far.
            in_flight: Tokens in the KV cache now.
            finished: Rows with results, and the tokens that they generated.
        """
        now = perf_counter()
        seconds = max(now - self._start, 1e-9)
        if now - self._since >= _RATE_SECONDS:
            self._rate = (tokens - self._tokens) / (now - self._since)
            self._since, self._tokens = now, tokens
        rate, total, done = self._rate or tokens / seconds, self._total(), self._before + rows
        left = None if total is None else _seconds_left(total - done, tokens, rate, finished)
        if self._status is not None and self._writes(now):
            self._written = now
            status = JobStatus(
                time=time(),
                seconds=seconds,
                done=done,
                total=total,
                errors=max(rows - finished[0], 0),
                rows_per_second=rows / seconds,
                tokens_per_second=rate,
                seconds_left=left,
                held=in_flight,
            )
            self._status.write(status)
            if not self._shows(now):
                return
        self._last = now
        speed = f"{rate:,.0f} tokens/s, {in_flight:,} tokens in flight"
        if left is not None:
            speed += f", about {_duration(left)} left"
        if self._terminal:
            if total is not None:
                self._bar.total, self._bar.bar_format = total, _BAR
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(done - self._bar.n)
        else:
            of = f" of {total:,} rows ({done / max(total, 1):.0%})" if total is not None else " rows"
            logger.info(f"hpcdecode: {seconds:.0f} s: {done:,}{of}, {rows / seconds:,.1f} rows/s, {speed}")

    def close(self, rows: int) -> None:
        """Show the final number of rows and end the bar."""
        self._bar.update(self._before + rows - self._bar.n)
        self._bar.close()


def _known(total: int | None) -> int | None:
    return total


def _seconds_left(rows: int, tokens: int, rate: float, finished: tuple[int, int]) -> float | None:
    """Return about how long the rows that are left take, if they have as many tokens as those that are done.

    Args:
        rows: Rows that are not done; some of them have tokens already.
        tokens: Tokens generated so far.
        rate: Tokens a second.
        finished: Rows with results, and the tokens that they generated.
    """
    if finished[0] <= 0 or rate <= 0:
        return None
    begun = max(tokens - finished[1], 0)
    return max(rows * finished[1] / finished[0] - begun, 0.0) / rate


def _duration(seconds: float) -> str:
    """Return a time such as 46 s, 12 min or 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class NoProgress(Progress):
    """Progress that is not shown."""

    def __init__(self) -> None:
        super().__init__(bar=False)

    def due(self) -> bool:
        """Return False."""
        return False
