"""What every benchmark prints: the machine, and cases with their ratio to a reference."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence as Seq
from typing import Any

import torch

from hpcdecode import attention


def case(name: str, values: Seq[float], unit: str, reference: str, ratios: Seq[float]) -> dict[str, Any]:
    """Medians of the values and of their ratios to the reference; spread: the ratios' quartiles."""
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "case": name,
        "value": round(statistics.median(values), 3),
        "unit": unit,
        "reference": reference,
        "ratio": round(statistics.median(ratios), 4),
        "spread": [round(low, 4), round(high, 4)],
    }


def machine() -> dict[str, Any]:
    """What figures depend on beside the code."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "isa": attention.isa(),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "torch": torch.__version__,
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
