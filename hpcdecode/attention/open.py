"""Open a KV cache by the name of its backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdecode.attention.base import BACKENDS, KvCache, LayerShape
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.cuda import CudaKvCache
from hpcdecode.attention.reference import ReferenceKvCache


def open_kv_cache(
    layers: Sequence[LayerShape],
    *,
    kv_dtype: str,
    capacity_tokens: int,
    max_sequences: int,
    block_tokens: int | None = None,
    threads: int = 1,
    cpus: Sequence[int] | None = None,
    nodes: Sequence[int] | None = None,
    team: bool = False,
    backend: str = "attn_cpu",
    device: Any = "cpu",
) -> KvCache:
    """Open a KV store for all attention layers of a model.

    `capacity_tokens` is rounded up to whole blocks; memory is touched only when it is used. `block_tokens` None: the
    measured best. `cpus`: one CPU per thread; workers are pinned, the calling thread is left as it is. `nodes`: the
    NUMA node of each of `cpus` (None: as the system tells); every node gets a share of the blocks and of the work.
    `team`: run on torch's OpenMP threads, for a process that runs matrix products on the same cores.
    `device`: of `attn_cuda`; on the CPU its kernels are emulated.
    The environment variable HPCDECODE_ISA forces an instruction set. Raises ValueError on bad arguments.
    """
    if backend == "reference":
        return ReferenceKvCache(layers, kv_dtype, capacity_tokens, max_sequences, block_tokens)
    if backend == "attn_cuda":
        return CudaKvCache(layers, kv_dtype, capacity_tokens, max_sequences, block_tokens, device)
    if backend != "attn_cpu":
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    return CpuKvCache(layers, kv_dtype, capacity_tokens, max_sequences, block_tokens, threads, cpus, nodes, team)
