"""Where cores lie, as the system tells: their NUMA nodes, and which of them are one physical core."""

from __future__ import annotations

import os
from collections.abc import Iterable

_CPU = "/sys/devices/system/cpu/cpu{}"


# Of libraries that are not loaded yet. The tokenizer starts no threads; oneDNN keeps fewer of its kernels, which are
# megabytes each. Beside other ranks OpenMP's threads spin for a millisecond or less: long enough to stay awake from one
# matrix product to the next, not as long as libgomp's default, which starves ranks that share their cores.
_ALWAYS = {"TOKENIZERS_PARALLELISM": "false", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
_BESIDE_RANKS = {"GOMP_SPINCOUNT": "20000"}
SETTINGS = {**_ALWAYS, **_BESIDE_RANKS}


def set_libraries(ranks: int) -> None:
    """Have settings for a process that is one of so many ranks, where the environment has none."""
    for name, value in (SETTINGS if ranks > 1 else _ALWAYS).items():
        os.environ.setdefault(name, value)


def nodes_of(cpus: Iterable[int]) -> list[int]:
    """The NUMA node of each of `cpus`; empty where the system does not tell."""
    nodes = [_node(cpu) for cpu in cpus]
    return [] if None in nodes else nodes


def arranged(cpus: Iterable[int]) -> list[int]:
    """`cpus` by NUMA node, and within a node by physical core: what is near in this order is near in the machine."""
    return sorted(cpus, key=lambda cpu: (_node(cpu) or 0, _core(cpu), cpu))


def _node(cpu: int) -> int | None:
    try:
        entries = os.listdir(_CPU.format(cpu))
    except OSError:
        return None
    return next((int(e[4:]) for e in entries if e.startswith("node") and e[4:].isdigit()), None)


def _core(cpu: int) -> int:
    """The first hardware thread of the core that `cpu` is one of."""
    try:
        with open(_CPU.format(cpu) + "/topology/thread_siblings_list") as file:
            return int(file.read().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu
