"""Memory that this process may still take, as system and batch system see it, what it gives back, and huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from contextlib import suppress

import torch
from torch import Tensor

from hpcdecode.cgroup import memory_room, read

_HUGE_PAGE = 2 << 20


def available_bytes() -> int:
    """The least of what the host has free, what the control groups leave, and what Slurm granted on this node."""
    limits = [_meminfo(), memory_room(), _granted("SLURM_MEM_PER_NODE", 1)]
    limits.append(_granted("SLURM_MEM_PER_CPU", _number("SLURM_CPUS_ON_NODE") or 1))
    return min(limit for limit in limits if limit is not None)


def give_back() -> None:
    """Let the system have the freed memory that glibc keeps for the next allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def huge_zeros(nbytes: int) -> Tensor:
    """uint8 [nbytes], in huge pages but for what is less than one, where the system has them.

    For what is read again and again: the products of a pass over weights in small pages wait for page tables.
    """
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    start = -mapped.data_ptr() % _HUGE_PAGE
    if (whole := nbytes // _HUGE_PAGE * _HUGE_PAGE) and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return mapped[start : start + nbytes]


def _meminfo() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", read("/proc/meminfo"))
    return int(found[1]) << 10 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _granted(name: str, times: int) -> int | None:
    """Bytes of `times` grants in MiB, or None where Slurm grants all (0) or does not tell."""
    return (_number(name) << 20) * times or None


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else 0
