"""Types of what benchmarks return: see `report.benchmark`, which makes them."""

from __future__ import annotations

from typing import Any

Case = dict[str, Any]  # case, value, unit, reference, ratio and spread, as JSON
Report = dict[str, Any]  # bench, machine and cases, as JSON: what `bench --json` prints
