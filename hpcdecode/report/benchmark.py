"""The output of every benchmark: the machine, and cases with their ratio to a reference."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from hpcdecode.attention import base as attention


def case(name: str, values: Sequence[float], unit: str, reference: str, ratios: Sequence[float]) -> dict[str, Any]:
    """Return a case with the medians of the values and of their ratios to the reference."""
    return entry(name, statistics.median(values), unit, reference, statistics.median(ratios), ratios)


def entry(name: str, value: float, unit: str, reference: str, ratio: float, ratios: Sequence[float]) -> dict[str, Any]:
    """Return a case with a value, its ratio to the reference, and the quartiles of single ratios as `spread`."""
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "case": name,
        "value": round(value, 5),
        "unit": unit,
        "reference": reference,
        "ratio": round(ratio, 5),
        "spread": [round(low, 5), round(high, 5)],
    }


def seconds_of(call: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call."""
    begun = perf_counter()
    call()
    return perf_counter() - begun


def machine() -> dict[str, Any]:
    """Return the facts of the machine and its software that figures depend on."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "isa": attention.isa(),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "torch": str(torch.__version__),
        "system": platform.platform(),
    }


def _first_line(path: str) -> str:
    try:
        with open(path) as f:
            return f.readline().strip()
    except OSError:
        return "unknown"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"
