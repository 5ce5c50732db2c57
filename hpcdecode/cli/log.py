"""Messages of the command: plain lines on standard error, from a chosen level on."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext


def set_up(level: int = logging.INFO) -> None:
    """Print the package's messages of `level` and above to standard error.

    Other libraries' messages are printed from warnings on, as Python does without a handler. A second call only
    changes the level.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, _StandardError) for handler in root.handlers):
        root.addHandler(_StandardError())
    logging.getLogger("hpcdecode").setLevel(level)


class _StandardError(logging.Handler):
    """Prints to `sys.stderr` as it is when a message comes, since callers may redirect it. A progress bar moves on."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with bars.external_write_mode(file=sys.stderr) if bars else nullcontext():
            print(self.format(record), file=sys.stderr, flush=True)
