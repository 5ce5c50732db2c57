"""The outcomes of a first day's parts, and the two files that have them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import hpcdecode
from hpcdecode.bench.gpu.findings import Conditions
from hpcdecode.bench.gpu.page import page
from hpcdecode.bench.gpu.parts import DONE, PARTS

_LONGEST = 300  # characters of what a check found, in a line
logger = logging.getLogger(__name__)


class FirstDayReport:
    """The outcomes of all parts: status, seconds, checks, figures, notes and error of each.

    Args:
        on: What the parts run on.
        resume: Begin with what is in the files.
    """

    def __init__(self, on: Conditions, resume: bool):
        self.json, self.page = on.work / "first_day.json", on.work / "first_day.md"
        known = json.loads(self.json.read_text()) if resume and self.json.exists() else {}
        self._outcomes: dict[str, dict[str, Any]] = known["parts"] if known.get("emulated") == on.emulated else {}
        self._emulated = on.emulated

    def passed(self, name: str) -> bool:
        """Return whether a part passed, or had nothing to run here."""
        return self._outcomes.get(name, {}).get("status") in DONE

    def keep(self, name: str, outcome: dict[str, Any]) -> None:
        """Take the outcome of a part, write both files, and tell it."""
        self._outcomes[name] = outcome
        parts = {each: self._outcomes[each] for each in PARTS if each in self._outcomes}
        found = {"bench": "gpu --first-day", "version": hpcdecode.__version__, "emulated": self._emulated}
        _write(self.json, json.dumps({**found, "parts": parts}, indent=1))
        _write(self.page, page({**found, "parts": parts}))
        logger.info(f"{name}: {outcome['status']} in {outcome['seconds']:.1f} s{_surprises(outcome)}")


def _surprises(outcome: dict[str, Any]) -> str:
    """Return what failed, a line each."""
    wrong = [check for check in outcome["checks"] if not check["passed"]]
    lines = [f"{c['check']}: expected {c['expected']}, found {str(c['found'])[:_LONGEST]}" for c in wrong]
    lines += outcome["error"].strip().splitlines()[-1:]
    return "".join(f"\n    {line}" for line in lines)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text)
    part.replace(path)
