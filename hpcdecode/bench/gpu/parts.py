"""The parts of the first day, in order; python -m hpcdecode.bench.gpu.parts NAME WORK SECONDS [emulated] runs one."""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from hpcdecode.bench.gpu.findings import Conditions, Findings, PartSkipped

_ROOM = "hpcdecode.bench.gpu."
_WARN = 3  # seconds before the limit at which stacks are printed
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
DONE = PASSED, SKIPPED
CODES = {PASSED: 0, FAILED: 1, SKIPPED: 77}  # exit codes of a part


class DayPart(NamedTuple):
    """A part of the first day.

    Attributes:
        module: Where its function is.
        function: Name of that, which takes `Conditions` and `Findings`.
        seconds: Time limit.
        alone: Nothing else may run beside it, as it measures.
    """

    module: str
    function: str
    seconds: int
    alone: bool


PARTS = {
    "machine": DayPart("machine", "machine", 30, True),
    "doctor": DayPart("machine", "doctor", 60, True),
    "kernels": DayPart("kernels", "kernels", 150, False),
    "sanitizer": DayPart("kernels", "sanitizer", 110, False),
    "parity": DayPart("tokens", "parity", 120, False),
    "syncs": DayPart("waits", "syncs", 60, False),
    "prompts": DayPart("prompts", "prompts", 45, True),
    "attention": DayPart("speed", "attention_rates", 90, True),
    "slices": DayPart("speed", "slice_times", 120, True),
    "transfers": DayPart("speed", "transfer_times", 45, True),
    "jobs": DayPart("speed", "job_rates", 150, True),
    "compile": DayPart("speed", "compiling", 120, True),
}


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
