"""Memory that this process may still take, as the system and the batch system see it."""

from __future__ import annotations

import os
import re


def available_bytes() -> int:
    """The least of what the host has free, the cgroup's limit, and what Slurm granted on this node."""
    limits = [_meminfo()]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit():
            limits.append(int(text))
    granted = os.environ.get("SLURM_MEM_PER_NODE", "")
    if granted.isdigit() and int(granted) > 0:
        limits.append(int(granted) << 20)
    return min(limits)


def _meminfo() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    return int(found[1]) << 10 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
