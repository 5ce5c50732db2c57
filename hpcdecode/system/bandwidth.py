"""Read bandwidth of this machine's memory: the reference that attention is measured against."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpcdecode import _attn_cpu
from hpcdecode.system.cores import nodes_of


def probe(threads: int = 1, cpus: Sequence[int] = (), mebibytes: int = 256) -> _attn_cpu.ReadProbe:
    """Return a touched buffer in huge pages, whose `seconds()` reads all of its `bytes` once.

    Args:
        threads: Threads that read.
        cpus: CPUs to pin the threads to; empty for no pinning.
        mebibytes: Size of the buffer in MiB.
    """
    isa = os.environ.get("HPCDECODE_ISA", "")
    return _attn_cpu.ReadProbe(mebibytes << 20, threads, list(cpus), isa, nodes_of(cpus))


def read_rate(cpus: Sequence[int], threads: int | None = None, passes: int = 9) -> float:
    """Return the read bandwidth of the fastest pass in bytes per second.

    Args:
        cpus: CPUs to pin threads to; empty for no pinning.
        threads: Threads that read; None for one on each of `cpus`.
        passes: Times that the buffer is read.
    """
    threads = threads or len(cpus)
    reader = probe(threads, cpus[:threads], max(256, 64 * threads))  # more than the caches hold
    return reader.bytes / min(reader.seconds() for _ in range(passes))
