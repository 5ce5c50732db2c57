"""The first day on a GPU, in its emulated form: parts in order, each in a process, resumed, stopped and timed."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic

import pytest

from hpcdecode.bench.gpu import first_day as module
from hpcdecode.bench.gpu.findings import Conditions, Findings
from hpcdecode.bench.gpu.first_day import first_day
from hpcdecode.bench.gpu.page import page
from hpcdecode.bench.gpu.parts import PARTS, DayPart

MINUTES = 600
SHORT = [name for name in PARTS if name != "compile"]  # torch's compiler takes a minute on two cores


def report(work):
    return json.loads((work / "first_day.json").read_text())["parts"]


def test_every_part_runs_in_its_emulated_form(tmp_path):
    assert first_day(Conditions(tmp_path, True), SHORT, MINUTES, keep_going=True) == 0, report(tmp_path)
    parts = report(tmp_path)
    assert list(parts) == SHORT
    assert {name for name, part in parts.items() if part["status"] == "skipped"} == {"sanitizer", "transfers"}
    assert all(part["notes"]["skipped"] for part in parts.values() if part["status"] == "skipped")
    checked = {name for name, part in parts.items() if part["checks"]}
    assert checked == {"machine", "doctor", "kernels", "sanitizer", "parity", "syncs"}
    assert {name for name, part in parts.items() if part["figures"]} == {"attention", "slices", "jobs"}
    text = (tmp_path / "first_day.md").read_text()
    assert all(f"## {name}: {part['status']}" in text for name, part in parts.items())


@pytest.mark.full
def test_compiling_twice(tmp_path):
    assert first_day(Conditions(tmp_path, True), ["compile"], MINUTES) == 0, report(tmp_path)


@pytest.fixture
def own_parts(tmp_path, monkeypatch):
    """Parts of a module beside this test, in place of those of the day; what they did is a line each in done.txt."""
    (tmp_path / "day_parts.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in NAMES:
        monkeypatch.setitem(PARTS, name, DayPart("day_parts", name, LIMIT, True))
    line = module._line
    monkeypatch.setattr(module, "_line", lambda *given: [line(*given)[0], "-c", RUN, *line(*given)[3:]])
    monkeypatch.setattr(module, "_MODELS", ())
    monkeypatch.setattr(module, "checkpoint", lambda *_: None)
    return Conditions(tmp_path / "work", True)


LIMIT = 20  # seconds; a process starts in less, also on a machine that does much else
NAMES = ("good", "failing", "raising", "dying", "hanging", "other")
FUNCTIONS = """
import os, subprocess, time

def good(on, findings):
    findings.check("a", "b", 1, True)
    with open(on.work / "done.txt", "a") as file:
        file.write("good\\n")

other = good

def failing(on, findings):
    findings.check("wrong", "3", 4, False)

def raising(on, findings):
    findings.check("first", "1", 1, True)
    raise ValueError("a particular problem")

def dying(on, findings):
    os.kill(os.getpid(), 11)

def hanging(on, findings):
    findings.note("pid", subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    time.sleep(60)
"""
RUN = f"""
import sys
from pathlib import Path
import hpcdecode.bench.gpu.__main__ as own
from hpcdecode.bench.gpu import parts
own._ROOM = ""
parts.PARTS.update((name, parts.DayPart("day_parts", name, {LIMIT}, True)) for name in {NAMES})
name, work, seconds, *_ = sys.argv[1:]
raise SystemExit(own.main(name, float(seconds), own.Conditions(Path(work), True)))
"""


def test_it_stops_at_the_first_surprise_and_goes_on_if_told(own_parts):
    asked = ["good", "failing", "other"]
    assert first_day(own_parts, asked, MINUTES) == 1
    assert {name: part["status"] for name, part in report(own_parts.work).items()} == {
        "good": "passed",
        "failing": "failed",
    }
    assert first_day(own_parts, asked, MINUTES, resume=True, keep_going=True) == 1
    assert {name: part["status"] for name, part in report(own_parts.work).items()} == {
        "good": "passed",
        "failing": "failed",
        "other": "passed",
    }
    assert (own_parts.work / "done.txt").read_text() == "good\n" * 2  # what passed is not run again
    assert "| wrong | 3 | 4 | **no** |" in (own_parts.work / "first_day.md").read_text()


def test_a_failed_part_leaves_its_traceback_and_what_it_found(own_parts):
    assert first_day(own_parts, ["raising", "dying"], MINUTES, keep_going=True) == 1
    raising, dying = report(own_parts.work).values()
    assert "Traceback" in raising["error"] and "a particular problem" in raising["error"]
    assert [check["check"] for check in raising["checks"]] == ["first"]
    assert "Segmentation fault" in dying["error"] and "ended with code -11" in dying["error"]


def runs(pid):
    """Whether a process is there, and not merely left for its parent to look at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_hangs_is_ended_with_what_it_started(own_parts):
    assert first_day(own_parts, ["hanging", "other"], 12) == 1  # no time is left for the other
    (hanging,) = report(own_parts.work).values()
    assert "took longer than" in hanging["error"]
    assert "in hanging" in hanging["error"], "where it was"
    until = monotonic() + 10
    while runs(hanging["notes"]["pid"]):  # it has been killed, and ends when it has its turn
        assert monotonic() < until


def test_a_figure_out_of_its_range_is_a_surprise(tmp_path):
    findings = Findings(tmp_path / "a.json")
    case = {"case": "c", "value": 1.0, "unit": "GB/s", "reference": "copying", "ratio": 0.6, "spread": [0.6, 0.6]}
    findings.figure(case, least=0.5)
    assert findings.passed
    findings.figure(case, least=0.7)
    findings.figure(case, most=0.5)
    assert [check["passed"] for check in findings.checks] == [True, False, False]
    assert json.loads((tmp_path / "a.json").read_text())["checks"] == findings.checks
    outcome = {"status": "failed", "seconds": 1.0, "error": "a\nb", **json.loads((tmp_path / "a.json").read_text())}
    text = page({"version": "0", "emulated": False, "parts": {"speed": outcome}})
    assert "| c | >= 0.7 of copying | 0.6 | **no** |" in text
