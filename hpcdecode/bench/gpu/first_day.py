"""The first day on a GPU: its parts in order, each in a process of its own, up to the first surprise."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from time import perf_counter, strftime
from typing import Any

import hpcdecode
from hpcdecode.bench.gpu.findings import Conditions
from hpcdecode.bench.gpu.parts import CODES, DONE, FAILED, PARTS
from hpcdecode.bench.gpu.report import FirstDayReport
from hpcdecode.bench.workload import checkpoint

_LEAST = 10  # seconds that a part needs
_GRACE = 5  # seconds that a part has to end what it has started
_LOG_TEXT = 20_000  # characters of a failed part's log that are kept
_MODELS = ("tiny", "tiny-6-layers")  # that several parts take
_LARGE = {"slices", "transfers", "jobs"}  # parts that take a model which is made meanwhile
logger = logging.getLogger(__name__)


def first_day(
    on: Conditions, names: Collection[str], seconds: float, *, resume: bool = False, keep_going: bool = False
) -> int:
    """Run parts of the first day; write first_day.json and first_day.md after each.

    Args:
        on: What they run on.
        names: Names of parts.
        seconds: Time for all of them.
        resume: Leave out parts that passed before.
        keep_going: Go on after a part that failed.

    Returns:
        The exit code, 1 if a part failed or did not run.
    """
    on.folder.mkdir(parents=True, exist_ok=True)
    report, begun = FirstDayReport(on, resume), perf_counter()
    asked = [name for name in PARTS if name in names]
    todo = [name for name in asked if not (resume and report.passed(name))]
    for model in _MODELS if todo else ():
        checkpoint(on.work, model)
    large = ThreadPoolExecutor(1).submit(checkpoint, on.work, on.model) if _LARGE & {*todo} else None
    for together in _groups(todo):
        if large and _LARGE & {*together}:
            wait([large])  # if it failed, these parts tell
        left = seconds - (perf_counter() - begun)
        if left < _LEAST:
            logger.warning(f"{', '.join(todo[todo.index(together[0]) :])}: not run, as {seconds:.0f} s have gone")
            break
        with ThreadPoolExecutor(len(together)) as pool:
            outcomes = pool.map(partial(_run, on=on, left=left), together)
            for name, outcome in zip(together, outcomes, strict=True):
                report.keep(name, outcome)
        if not keep_going and not all(report.passed(name) for name in together):
            break
    logger.info(f"first day: {perf_counter() - begun:.0f} s, {report.page}")
    return 0 if all(report.passed(name) for name in asked) else 1


def _groups(names: Iterable[str]) -> list[list[str]]:
    """Return the parts that run beside each other; those that measure run alone."""
    places = {name: place for place, name in enumerate(PARTS)}
    each = groupby(names, lambda name: places[name] if PARTS[name].alone else -1)
    return [list(group) for _, group in each]


def _run(name: str, on: Conditions, left: float) -> dict[str, Any]:
    """Run a part in a process of its own, for at most `left` seconds, and return its outcome."""
    limit = min(PARTS[name].seconds, left)
    log, found = on.folder / f"{name}.log", on.folder / f"{name}.json"
    found.unlink(missing_ok=True)
    line, environment = _line(name, on, limit), _environment()
    begun, at = perf_counter(), strftime("%Y-%m-%d %H:%M:%S")
    with open(log, "w") as to:
        process = subprocess.Popen(line, stdout=to, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        code, late = _ended(process, limit)
    status = FAILED if late else next((word for word, known in CODES.items() if known == code), FAILED)
    error = "" if status in DONE else log.read_text(errors="replace")[-_LOG_TEXT:]
    if late:
        error += f"\ntook longer than {limit:.0f} s"
    elif code not in CODES.values():
        error += f"\nended with code {code}"
    kept = json.loads(found.read_text()) if found.exists() else {"checks": [], "figures": [], "notes": {}}
    return {"status": status, "at": at, "seconds": round(perf_counter() - begun, 2), "error": error, **kept}


def _line(name: str, on: Conditions, limit: float) -> list[str]:
    """Return the command that runs a part."""
    own = [name, str(on.work), str(limit), *(["emulated"] if on.emulated else [])]
    return [sys.executable, "-m", "hpcdecode.bench.gpu", *own]


def _ended(process: subprocess.Popen[bytes], seconds: float) -> tuple[int, bool]:
    """Wait for a process, and end it and all that it started after some seconds.

    Returns:
        Its exit code, and whether it was late.
    """
    try:
        return process.wait(seconds), False
    except subprocess.TimeoutExpired:
        started = _descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return -1, True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, []))
    for each in found:
        found += children.get(each, [])
    return found


def _environment() -> dict[str, str]:
    """Return the environment of a part: this package, also if it is a folder that is not installed; no network."""
    root = str(Path(hpcdecode.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
