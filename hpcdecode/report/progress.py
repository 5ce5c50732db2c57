"""Progress of a job: a bar on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
from time import perf_counter

from tqdm import tqdm

_LINE_SECONDS = 30.0
_BAR_SECONDS = 0.2
_RATE_SECONDS = 5.0  # shortest time for a rate: steps with prompts take seconds and yield few tokens
logger = logging.getLogger(__name__)


class Progress:
    """Shows progress: ask `due` regularly, and call `update` if it is.

    Args:
        bar: Show a bar rather than lines; None shows it on a terminal. Nothing is shown if INFO messages are off,
            unless this is True.
        total: Number of rows; None if it is not known.
    """

    def __init__(self, *, bar: bool | None = None, total: int | None = None) -> None:
        self._lines = logger.isEnabledFor(logging.INFO)
        self._terminal = self._lines and sys.stderr.isatty() if bar is None else bar
        columns = shutil.get_terminal_size().columns
        self._bar = tqdm(total=total, unit=" rows", disable=not self._terminal, file=sys.stderr, ncols=columns)
        self._start = self._last = self._since = perf_counter()
        self._rate, self._tokens = 0.0, 0  # tokens a second, and the tokens at `_since`

    def due(self) -> bool:
        """Return whether it is time for an update."""
        if not (self._terminal or self._lines):
            return False
        return perf_counter() - self._last >= (_BAR_SECONDS if self._terminal else _LINE_SECONDS)

    def restart(self) -> None:
        """Count tokens from 0 again."""
        self._tokens = 0

    def update(self, rows: int, tokens: int, in_flight: int) -> None:
        """Show the progress.

        Args:
            rows: Rows that are done.
            tokens: Tokens generated so far.
            in_flight: Tokens in the KV cache now.
        """
        self._last = now = perf_counter()
        if now - self._since >= _RATE_SECONDS:
            self._rate = (tokens - self._tokens) / (now - self._since)
            self._since, self._tokens = now, tokens
        speed = f"{self._rate:,.0f} tokens/s, {in_flight:,} tokens in flight"
        if self._terminal:
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(rows - self._bar.n)
        else:
            logger.info(f"hpcdecode: {now - self._start:.0f} s: {rows:,} rows, {speed}")

    def close(self, rows: int) -> None:
        """Show the final number of rows and end the bar."""
        self._bar.update(rows - self._bar.n)
        self._bar.close()


class NoProgress(Progress):
    """Progress that is not shown."""

    def __init__(self) -> None:
        super().__init__(bar=False)

    def due(self) -> bool:
        """Return False."""
        return False
