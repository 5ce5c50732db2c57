"""The parts of the first day, in order."""

from __future__ import annotations

from typing import NamedTuple

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
DONE = PASSED, SKIPPED
CODES = {PASSED: 0, FAILED: 1, SKIPPED: 77}  # exit codes of a part


class DayPart(NamedTuple):
    """A part of the first day.

    Attributes:
        module: Where its function is, in this package.
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
    "syncs": DayPart("waits", "syncs", 110, False),
    "prompts": DayPart("prompts", "prompts", 45, True),
    "attention": DayPart("speed", "attention_rates", 90, True),
    "slices": DayPart("speed", "slice_times", 120, True),
    "transfers": DayPart("speed", "transfer_times", 45, True),
    "jobs": DayPart("speed", "job_rates", 150, True),
    "compile": DayPart("speed", "compiling", 120, True),
}
