"""What a part of the first day finds: checks, figures and notes, saved as they come, and what it runs on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpcdecode.bench.output import Case


class PartSkipped(Exception):
    """A part has nothing to run here; the message says why."""


@dataclass(frozen=True)
class Conditions:
    """What the parts of a first day run on.

    Attributes:
        work: Folder of checkpoints and reports.
        emulated: Run small on the CPU, with the kernels emulated.
    """

    work: Path
    emulated: bool

    @property
    def device(self) -> torch.device:
        """Return the device of S and R."""
        return torch.device("cpu") if self.emulated else torch.device("cuda", 0)

    @property
    def folder(self) -> Path:
        """Return the folder of what parts write."""
        return self.work / "first_day"

    @property
    def model(self) -> str:
        """Return the name of the model whose speed is measured."""
        return "tiny" if self.emulated else "8b-4-layers"


@dataclass
class Findings:
    """What a part has found so far.

    Attributes:
        path: File that has it as JSON.
        checks: Check, expectation, what was found, and whether it passed.
        figures: Cases, as all benchmarks have them.
        notes: Facts by name.
    """

    path: Path
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: list[Case] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Return whether all checks passed."""
        return all(check["passed"] for check in self.checks)

    def check(self, name: str, expected: str, found: object, passed: bool) -> None:
        """Keep a check."""
        self.checks.append({"check": name, "expected": expected, "found": found, "passed": bool(passed)})
        self.save()

    def note(self, name: str, value: object) -> None:
        """Keep a fact."""
        self.notes[name] = value
        self.save()

    def figure(self, case: Case, least: float | None = None, most: float | None = None) -> None:
        """Keep a case; check its ratio if there is a bound.

        Args:
            case: The case.
            least: Of the ratio.
            most: Of the ratio.
        """
        self.figures.append(case)
        ratio, of = case["ratio"], f"of {case['reference']}"
        if least is not None:
            self.check(case["case"], f">= {least} {of}", ratio, ratio >= least)
        if most is not None:
            self.check(case["case"], f"<= {most} {of}", ratio, ratio <= most)
        self.save()

    def figures_of(self, cases: Iterable[Case]) -> None:
        """Keep cases that have no bounds."""
        for case in cases:
            self.figure(case)

    def save(self) -> None:
        """Write all of it to the file."""
        text = json.dumps({"checks": self.checks, "figures": self.figures, "notes": self.notes}, indent=1, default=str)
        part = self.path.with_suffix(".part")
        part.write_text(text)
        part.replace(self.path)
