"""Limits that a batch system or a container sets by control groups (version 1 or 2) on this process."""

from __future__ import annotations

import os
from collections.abc import Iterator

_OWN = "/proc/self/cgroup"
_ROOT = "/sys/fs/cgroup"


def memory_room() -> int | None:
    """Bytes that may still be taken; cached files count as free. None: no limit."""
    rooms = []
    for folder, version, most in _memory_limits():
        used, cached = (
            ("memory.current", ("active_file", "inactive_file"))
            if version == 2
            else ("memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
        )
        taken = read(f"{folder}/{used}").strip()
        stat = dict(line.split()[:2] for line in read(f"{folder}/memory.stat").splitlines())
        free = sum(int(stat.get(name, 0)) for name in cached)
        rooms.append(max(most - int(taken or 0) + free, 0))
    return min(rooms, default=None)


def memory_limit() -> int | None:
    """Bytes that the processes of the control group may have. None: no limit."""
    return min((most for _, _, most in _memory_limits()), default=None)


def cpu_quota() -> float | None:
    """CPUs' worth of time that the process may use. None: no limit."""
    quotas = []
    for folder, version in _folders("cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        values = " ".join(read(f"{folder}/{name}") for name in names).split()
        if len(values) == 2 and values[0].isdigit():  # else "max", -1, or no such file
            quotas.append(int(values[0]) / int(values[1]))
    return min(quotas, default=None)


def cpus() -> list[int]:
    """CPUs that the control group leaves to its processes, whatever this one was bound to. Empty: not known."""
    files = (
        f"{folder}/cpuset.{'cpus.effective' if version == 2 else 'effective_cpus'}"
        for folder, version in _folders("cpuset")
    )
    return next((found for file in files if (found := listed(read(file)))), [])


def read(path: str) -> str:
    """The text of a system's file, empty where there is none."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def listed(text: str) -> list[int]:
    """Numbers as the system writes them: `0-2,5` is [0, 1, 2, 5]."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _memory_limits() -> Iterator[tuple[str, int, int]]:
    """Directory, version and bytes of every control group with a limit."""
    for folder, version in _folders("memory"):
        most = read(f"{folder}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}").strip()
        if most.isdigit() and int(most) < 1 << 60:  # else "max", or version 1's way to say so
            yield folder, version, int(most)


def _folders(controller: str) -> Iterator[tuple[str, int]]:
    """The directory of the process's group of `controller` and of all groups above it, each with its version."""
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
