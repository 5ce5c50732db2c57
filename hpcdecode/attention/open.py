"""Open a KV cache by the name of its backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcdecode.attention.base import BACKENDS, KvCache
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.cpu_states import CpuStateStore
from hpcdecode.attention.cuda import CudaKvCache
from hpcdecode.attention.hybrid import HybridKvCache
from hpcdecode.attention.reference import ReferenceKvCache
from hpcdecode.attention.shapes import LayerShape, MixerShape, RecurrentWeights, attention_shapes, recurrent_shapes
from hpcdecode.attention.sizes import block_tokens_for, state_tokens_for


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
    device: torch.device | str = "cpu",
) -> KvCache:
    """Open a KV cache for all attention layers of a model.

    The environment variable HPCDECODE_ISA forces an instruction set.

    Args:
        layers: Shapes of the attention layers.
        kv_dtype: Data type that K and V are stored as, one of KV_DTYPES.
        capacity_tokens: Tokens to hold, rounded up to whole blocks. Memory is touched only when it is used.
        max_sequences: Slots are 0 to max_sequences - 1.
        block_tokens: Tokens of a block, or None for the measured best.
        threads: Number of threads, the calling one included.
        cpus: One CPU per thread. Workers are pinned, the calling thread stays as it is.
        nodes: NUMA node of each of `cpus`, or None to ask the system. Every node gets a share of blocks and of work.
        team: True to run on torch's OpenMP threads, in a process that runs GEMMs on the same cores.
        backend: One of BACKENDS.
        device: Device of `attn_cuda`; on the CPU its kernels are emulated.

    Raises:
        ValueError: If an argument is bad.
        UserError: If the system maps no more memory.
    """
    if backend == "reference":
        return ReferenceKvCache(layers, kv_dtype, capacity_tokens, max_sequences, block_tokens)
    if backend == "attn_cuda":
        return CudaKvCache(layers, kv_dtype, capacity_tokens, max_sequences, block_tokens, device)
    if backend != "attn_cpu":
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    return CpuKvCache(layers, kv_dtype, capacity_tokens, max_sequences, block_tokens, threads, cpus, nodes, team)


def open_layers(
    layers: Sequence[MixerShape],
    weights: Sequence[RecurrentWeights],
    *,
    kv_dtype: str,
    capacity_tokens: int,
    max_sequences: int,
    block_tokens: int | None = None,
    threads: int = 1,
    cpus: Sequence[int] | None = None,
    team: bool = False,
    state_tokens: int | None = None,
) -> KvCache:
    """Open, on this machine's cores, what all layers of a model keep of sequences: K and V, and recurrent states.

    Args:
        layers: Shapes of the layers.
        weights: Of those that keep states, in order.
        kv_dtype: Data type that K and V are stored as, one of KV_DTYPES.
        capacity_tokens: Tokens to hold, rounded up to whole blocks, those that states count as included.
        max_sequences: Slots are 0 to max_sequences - 1.
        block_tokens: Tokens of a block, or None for the default.
        threads: Number of threads, the calling one included.
        cpus: One CPU per thread. Workers are pinned, the calling thread stays as it is.
        team: True to run on torch's OpenMP threads, in a process that runs GEMMs on the same cores.
        state_tokens: Tokens that a state counts as, or None for what it takes.

    Raises:
        ValueError: If an argument is bad.
        UserError: If the system maps no more memory.
    """
    attend, keep = attention_shapes(layers), recurrent_shapes(layers)
    kv_cache: KvCache | None = None
    if attend:
        kv_cache = open_kv_cache(
            attend,
            kv_dtype=kv_dtype,
            capacity_tokens=capacity_tokens,
            max_sequences=max_sequences,
            block_tokens=block_tokens,
            threads=threads,
            cpus=cpus,
            team=team,
        )
        if not keep:
            return kv_cache
    block_tokens = block_tokens or block_tokens_for(layers, kv_dtype)
    if state_tokens is None:
        state_tokens = state_tokens_for(layers, kv_dtype, block_tokens)
    states = CpuStateStore(keep, weights, max_sequences, threads, cpus, team, kv_cache)
    return HybridKvCache(layers, kv_cache, states, capacity_tokens, state_tokens, block_tokens)
