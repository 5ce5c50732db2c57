"""Memory that this process may still take, as system and batch system see it, what it gives back, and huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from contextlib import suppress

import torch
from torch import Tensor

from hpcdecode.system.cgroup import memory_limit, memory_room, read

_HUGE_PAGE = 2 << 20


def available_bytes() -> int:
    """The least of what the host has free, what the control groups leave, and what Slurm granted on this node.

    Also of what the limit of this process's address space leaves (`ulimit -v`).
    """
    room = _least(_kibibytes("/proc/meminfo", "MemAvailable") or _pages("SC_AVPHYS_PAGES"), memory_room())
    addresses = address_room()
    return room if addresses is None else min(room, addresses)


def address_room() -> int | None:
    """Bytes that may still be mapped under the limit of this process's address space. None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(limit - (_kibibytes("/proc/self/status", "VmSize") or 0), 0)


def total_bytes() -> int:
    """The least of what the host has, what the control groups allow, and what Slurm granted on this node."""
    return _least(_kibibytes("/proc/meminfo", "MemTotal") or _pages("SC_PHYS_PAGES"), memory_limit())


def anonymous_bytes() -> int:
    """Memory that this process holds and the system cannot take back without swapping."""
    return _kibibytes("/proc/self/status", "RssAnon") or 0


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


def _least(host: int, group: int | None) -> int:
    """Of bytes that the host and the control groups allow, and those that Slurm granted."""
    limits = [host, group]
    limits.append(_granted("SLURM_MEM_PER_NODE", 1))
    limits.append(_granted("SLURM_MEM_PER_CPU", _number("SLURM_CPUS_ON_NODE") or 1))
    return min(limit for limit in limits if limit is not None)


def _pages(name: str) -> int:
    """Bytes of as many pages as the system says."""
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _kibibytes(path: str, name: str) -> int | None:
    """Bytes that a file of the system gives in KiB under a name; None if it does not."""
    found = re.search(rf"^{name}:\s+(\d+) kB", read(path), re.MULTILINE)
    return int(found[1]) << 10 if found else None


def _granted(name: str, times: int) -> int | None:
    """Bytes of `times` grants in MiB, or None where Slurm grants all (0) or does not tell."""
    return (_number(name) << 20) * times or None


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else 0
