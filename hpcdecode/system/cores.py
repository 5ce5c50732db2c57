"""Topology of the CPUs as Linux reports it, and settings of libraries that depend on the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_CPU = "/sys/devices/system/cpu/cpu{}"
_BOOT = Path("/proc/sys/kernel/random/boot_id")

# Libraries read these when they are loaded. The tokenizer starts no threads. oneDNN keeps fewer of its kernels, which
# are megabytes each. Beside other ranks the threads of OpenMP spin for a millisecond at most. This keeps them awake
# between two GEMMs; libgomp's longer default starves ranks that share their cores. Open MPI moves what was posted over
# TCP while a rank computes.
_ALWAYS = {"TOKENIZERS_PARALLELISM": "false", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
_BESIDE_RANKS = {"GOMP_SPINCOUNT": "20000", "OMPI_MCA_btl_tcp_progress_thread": "1"}
SETTINGS = {**_ALWAYS, **_BESIDE_RANKS}


def set_libraries(ranks: int) -> None:
    """Set the environment variables of libraries for a job of `ranks` ranks; those that are set already stay."""
    for name, value in (SETTINGS if ranks > 1 else _ALWAYS).items():
        os.environ.setdefault(name, value)


def machine() -> str:
    """Return what names this machine until it boots again, in all of its containers; empty if it has no name."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def nodes_of(cpus: Iterable[int]) -> list[int]:
    """Return the NUMA node of each of `cpus`, or an empty list if the system does not tell."""
    nodes = []
    for cpu in cpus:
        node = _node(cpu)
        if node is None:
            return []
        nodes.append(node)
    return nodes


def arranged(cpus: Iterable[int]) -> list[int]:
    """Return `cpus` sorted by NUMA node, then by physical core, so that neighbours in the list share caches."""
    return sorted(cpus, key=lambda cpu: (_node(cpu) or 0, _core(cpu), cpu))


def _node(cpu: int) -> int | None:
    try:
        entries = os.listdir(_CPU.format(cpu))
    except OSError:
        return None
    return next((int(e[4:]) for e in entries if e.startswith("node") and e[4:].isdigit()), None)


def _core(cpu: int) -> int:
    """Return the first hardware thread of the physical core that `cpu` belongs to."""
    try:
        with open(_CPU.format(cpu) + "/topology/thread_siblings_list") as file:
            return int(file.read().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu
