"""Limits that a batch system or a container sets by control groups (version 1 or 2) on this process."""

from __future__ import annotations

import os
from collections.abc import Iterator

_OWN = "/proc/self/cgroup"
_ROOT = "/sys/fs/cgroup"


def memory_headroom() -> int | None:
    """Return the bytes that may still be taken, or None if there is no limit. Cached files count as free."""
    headrooms = []
    for folder, version, most in _memory_limits():
        used, cached = (
            ("memory.current", ("active_file", "inactive_file"))
            if version == 2
            else ("memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
        )
        taken = read(f"{folder}/{used}").strip()
        stat = dict(line.split()[:2] for line in read(f"{folder}/memory.stat").splitlines())
        free = sum(int(stat.get(name, 0)) for name in cached)
        headrooms.append(max(most - int(taken or 0) + free, 0))
    return min(headrooms, default=None)


def memory_limit() -> int | None:
    """Return the bytes that the control group may have, or None if there is no limit."""
    return min((most for _, _, most in _memory_limits()), default=None)


def cpu_quota() -> float | None:
    """Return how many CPUs' time the process may use, or None if there is no limit."""
    quotas = []
    for folder, version in _folders("cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        values = " ".join(read(f"{folder}/{name}") for name in names).split()
        if len(values) == 2 and values[0].isdigit():  # "max", -1 and a missing file mean no limit
            quotas.append(int(values[0]) / int(values[1]))
    return min(quotas, default=None)


def cpus() -> list[int]:
    """Return the CPUs of the control group, even those that this process is not bound to; empty if unknown."""
    files = (
        f"{folder}/cpuset.{'cpus.effective' if version == 2 else 'effective_cpus'}"
        for folder, version in _folders("cpuset")
    )
    return next((found for file in files if (found := listed(read(file)))), [])


def read(path: str) -> str:
    """Return the text of a file of the system, or an empty string if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def listed(text: str) -> list[int]:
    """Return the numbers of a list as Linux writes it: `0-2,5` is [0, 1, 2, 5]."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _memory_limits() -> Iterator[tuple[str, int, int]]:
    """Yield directory, cgroup version and bytes of every control group with a memory limit."""
    for folder, version in _folders("memory"):
        most = read(f"{folder}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}").strip()
        if most.isdigit() and int(most) < 1 << 60:  # "max", and in version 1 a huge number, mean no limit
            yield folder, version, int(most)


def _folders(controller: str) -> Iterator[tuple[str, int]]:
    """Yield directory and cgroup version of the process's group of `controller` and of all groups above it."""
    for line in read(_OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = f"{_ROOT}/{controller}" if controllers else _ROOT
        while True:
            yield root + path.rstrip("/"), 1 if controllers else 2
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
