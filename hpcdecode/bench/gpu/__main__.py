"""Runs one part of the first day: python -m hpcdecode.bench.gpu NAME WORK SECONDS [emulated]."""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from hpcdecode.bench.gpu.findings import Conditions, Findings, PartSkipped
from hpcdecode.bench.gpu.parts import CODES, FAILED, PARTS, PASSED, SKIPPED

_ROOM = "hpcdecode.bench.gpu."
_WARN = 3  # seconds before the limit at which stacks are printed


def main(name: str, seconds: float, on: Conditions) -> int:
    """Run a part; print the traceback of an error to the log, and keep what was found in `on.folder`.

    Args:
        name: Name of the part.
        seconds: Its time limit; shortly before that all stacks are printed.
        on: What it runs on.

    Returns:
        An exit code, of `CODES`.
    """
    part, findings = PARTS[name], Findings(on.folder / f"{name}.json")
    findings.save()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(seconds - _WARN, 1))
    signal.signal(signal.SIGTERM, _end)
    try:
        function: Callable[[Conditions, Findings], None] = getattr(import_module(_ROOM + part.module), part.function)
        function(on, findings)
    except PartSkipped as reason:
        findings.note("skipped", str(reason))
        return CODES[SKIPPED] if findings.passed else CODES[FAILED]
    except BaseException:
        traceback.print_exc()
        return CODES[FAILED]
    return CODES[PASSED] if findings.passed else CODES[FAILED]


def _end(*_: object) -> None:
    """End as at an interrupt, so that what the part has started ends too."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    name, work, seconds, *emulated = sys.argv[1:]
    raise SystemExit(main(name, float(seconds), Conditions(Path(work), emulated == ["emulated"])))
