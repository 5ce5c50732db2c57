"""Memory that this process has and may still take, as Linux and the batch system see it, and huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from contextlib import suppress

import torch
from torch import Tensor

from hpcdecode.system.cgroup import memory_headroom, memory_limit, read

HUGE_PAGE = 2 << 20  # bytes


def available_bytes() -> int:
    """Return the bytes that this process may still take.

    It is the least of the host's free memory, the headroom of the control groups, Slurm's grant on this node and the
    headroom of the address space.
    """
    available = _least(_kibibytes("/proc/meminfo", "MemAvailable") or _pages("SC_AVPHYS_PAGES"), memory_headroom())
    addresses = address_space_headroom()
    return available if addresses is None else min(available, addresses)


def address_space_headroom() -> int | None:
    """Return the bytes that this process may still map (`ulimit -v`), or None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(limit - (_kibibytes("/proc/self/status", "VmSize") or 0), 0)


def total_bytes() -> int:
    """Return the least of the host's memory, the control groups' limits and Slurm's grant on this node, in bytes."""
    return _least(_kibibytes("/proc/meminfo", "MemTotal") or _pages("SC_PHYS_PAGES"), memory_limit())


def anonymous_bytes() -> int:
    """Return the bytes of this process that the system can only reclaim by swapping (`RssAnon`)."""
    return _kibibytes("/proc/self/status", "RssAnon") or 0


def give_back() -> None:
    """Return freed memory, which glibc keeps for later allocations, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def huge_zeros(nbytes: int) -> Tensor:
    """Return zeros, uint8 [nbytes], in huge pages where the system has them; the last bytes may lie in small pages.

    For data that is read again and again, such as weights: GEMMs over small pages wait for page table walks.
    """
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    start = -mapped.data_ptr() % HUGE_PAGE
    if (whole := nbytes // HUGE_PAGE * HUGE_PAGE) and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return mapped[start : start + nbytes]


def _least(host: int, group: int | None) -> int:
    """Return the least of the bytes of the host, of the control groups and of Slurm's grants."""
    limits = [host, group]
    limits.append(_granted("SLURM_MEM_PER_NODE", 1))
    limits.append(_granted("SLURM_MEM_PER_CPU", _number("SLURM_CPUS_ON_NODE") or 1))
    return min(limit for limit in limits if limit is not None)


def _pages(name: str) -> int:
    """Return the bytes of the pages that `sysconf` counts under `name`."""
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _kibibytes(path: str, name: str) -> int | None:
    """Return the bytes that a file of the system states in KiB under `name`, or None if it does not."""
    found = re.search(rf"^{name}:\s+(\d+) kB", read(path), re.MULTILINE)
    return int(found[1]) << 10 if found else None


def _granted(name: str, times: int) -> int | None:
    """Return the bytes of `times` grants in MiB, or None if Slurm grants all memory (0) or does not tell."""
    return (_number(name) << 20) * times or None


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else 0
