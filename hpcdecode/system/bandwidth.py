"""Read bandwidth of this machine's memory: the floor that attention is measured against."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpcdecode import _attn_cpu
from hpcdecode.system.cores import nodes_of


def probe(threads: int = 1, cpus: Sequence[int] = (), mebibytes: int = 256) -> _attn_cpu.ReadProbe:
    """A touched huge-page buffer; `seconds()` reads all of its `bytes` once on the given threads."""
    isa = os.environ.get("HPCDECODE_ISA", "")
    return _attn_cpu.ReadProbe(mebibytes << 20, threads, list(cpus), isa, nodes_of(cpus))


def read_rate(cpus: Sequence[int], threads: int | None = None, passes: int = 9) -> float:
    """Bytes per second, of the fastest pass. threads: None for one on each of `cpus`; cpus: empty where not pinned."""
    threads = threads or len(cpus)
    reader = probe(threads, cpus[:threads], max(256, 64 * threads))  # more than the caches hold
    return reader.bytes / min(reader.seconds() for _ in range(passes))
