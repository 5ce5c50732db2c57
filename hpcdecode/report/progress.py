"""What a user sees while the job runs: a bar on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
from time import perf_counter

from tqdm import tqdm

_LINE_SECONDS = 30.0
_BAR_SECONDS = 0.2
_RATE_SECONDS = 5.0  # over which the rate is taken: steps with prompts take seconds and yield few tokens


class Progress:
    """Ask `due` at every turn, and call `update` when it is.

    bar: whether to show a bar (None: on a terminal) rather than lines. total: rows, where their number is known.
    """

    def __init__(self, *, bar: bool | None = None, total: int | None = None) -> None:
        self._terminal = sys.stderr.isatty() if bar is None else bar
        columns = shutil.get_terminal_size().columns
        self._bar = tqdm(total=total, unit=" rows", disable=not self._terminal, file=sys.stderr, ncols=columns)
        self._start = self._last = self._since = perf_counter()
        self._rate, self._tokens = 0.0, 0  # tokens a second, and the tokens at `_since`

    def due(self) -> bool:
        return perf_counter() - self._last >= (_BAR_SECONDS if self._terminal else _LINE_SECONDS)

    def restart(self) -> None:
        """Tokens are counted from 0 again."""
        self._tokens = 0

    def update(self, rows: int, tokens: int, in_flight: int) -> None:
        """rows and tokens so far; in_flight: tokens in the KV cache now."""
        self._last = now = perf_counter()
        if now - self._since >= _RATE_SECONDS:
            self._rate = (tokens - self._tokens) / (now - self._since)
            self._since, self._tokens = now, tokens
        speed = f"{self._rate:,.0f} tokens/s, {in_flight:,} tokens in flight"
        if self._terminal:
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(rows - self._bar.n)
        else:
            print(f"hpcdecode: {now - self._start:.0f} s: {rows:,} rows, {speed}", file=sys.stderr, flush=True)

    def close(self, rows: int) -> None:
        self._bar.update(rows - self._bar.n)
        self._bar.close()


class NoProgress(Progress):
    """Shows nothing."""

    def __init__(self) -> None:
        super().__init__(bar=False)

    def due(self) -> bool:
        return False
