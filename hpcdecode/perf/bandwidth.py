"""Read bandwidth of this machine's memory: the floor that attention is measured against."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpcdecode import _attn_cpu


def probe(threads: int = 1, cpus: Sequence[int] = (), mebibytes: int = 256) -> _attn_cpu.ReadProbe:
    """A touched huge-page buffer; `seconds()` reads all of its `bytes` once on the given threads."""
    return _attn_cpu.ReadProbe(mebibytes << 20, threads, list(cpus), os.environ.get("HPCDECODE_ISA", ""))
