"""Open what keeps K, V and states: on this machine's cores, or on a GPU. Nothing else chooses the class."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcdecode.attention import cuda
from hpcdecode.attention.base import BACKENDS, KvCache
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.cpu_states import CpuStateStore
from hpcdecode.attention.cuda import CudaKvCache
from hpcdecode.attention.device_states import DeviceStateStore
from hpcdecode.attention.host import HostKvCache
from hpcdecode.attention.hybrid import HybridKvCache
from hpcdecode.attention.recurrent_shapes import RecurrentWeights
from hpcdecode.attention.reference import ReferenceKvCache
from hpcdecode.attention.shapes import LayerShape, MixerShape, attention_shapes, recurrent_shapes, state_bytes
from hpcdecode.attention.sizes import block_tokens_for, state_tokens_for
from hpcdecode.attention.torch_cache import TorchKvCache
from hpcdecode.attention.torch_layer import layer_block_bytes


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
    windowed: bool = False,
    lookahead: int = 0,
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
        device: Device of `attn_cuda`, whose kernels are emulated on the CPU, and of `torch`.
        windowed: Whether sequences give up what leaves windows, as `CpuKvCache` says.
        lookahead: Tokens by which a slot may be truncated all the same, as there.

    Raises:
        ValueError: If an argument is bad.
        UserError: If the system maps no more memory.
    """
    sizes = capacity_tokens, max_sequences, block_tokens
    if backend == "reference":
        return ReferenceKvCache(layers, kv_dtype, *sizes)
    if backend == "attn_cuda":
        return CudaKvCache(layers, kv_dtype, *sizes, device, windowed=windowed, lookahead=lookahead)
    if backend == "torch":
        return TorchKvCache(layers, kv_dtype, *sizes, device)
    if backend != "attn_cpu":
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    return CpuKvCache(layers, kv_dtype, *sizes, threads, cpus, nodes, team, windowed, lookahead)


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
    windowed: bool = False,
    lookahead: int = 0,
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
        windowed: Whether sequences give up what leaves windows, as `CpuKvCache` says.
        lookahead: Tokens by which a slot may be truncated all the same, as there.

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
            windowed=windowed,
            lookahead=lookahead,
        )
        if not keep:
            return kv_cache
    block_tokens = block_tokens or block_tokens_for(layers, kv_dtype)
    if state_tokens is None:
        state_tokens = state_tokens_for(layers, kv_dtype, block_tokens)
    states = CpuStateStore(keep, weights, max_sequences, threads, cpus, team, kv_cache)
    return HybridKvCache(layers, kv_cache, states, capacity_tokens, state_tokens, block_tokens)


def open_on_device(
    layers: Sequence[MixerShape],
    weights: Sequence[RecurrentWeights],
    *,
    kv_dtype: str,
    capacity_tokens: int,
    max_sequences: int,
    block_tokens: int,
    state_tokens: int,
    device: torch.device | str,
    host_tensors: bool = False,
    windowed: bool = False,
    lookahead: int = 0,
) -> KvCache:
    """Open, on a GPU, what all layers of a model keep of sequences; arguments as for `open_layers`.

    Kernels attend to K, V and latents where there are some, and torch's operations to all else (see `by_kernels`).

    Args:
        layers: Shapes of the layers.
        weights: Of those that keep states, in order, on the host.
        kv_dtype: Data type that K and V are stored as.
        capacity_tokens: Tokens to hold, as `device_capacity` says.
        max_sequences: Slots are 0 to max_sequences - 1.
        block_tokens: Tokens of a block.
        state_tokens: Tokens that a state counts as.
        device: The GPU; on the CPU what a GPU does is emulated.
        host_tensors: Whether rows and outputs are in this host's memory.
        windowed: Whether sequences give up what leaves windows, where kernels attend.
        lookahead: Tokens by which a slot may be truncated all the same.
    """
    attend, keep = attention_shapes(layers), recurrent_shapes(layers)
    kv_cache: KvCache | None = None
    if attend:
        backend = "attn_cuda" if by_kernels(attend, kv_dtype, device) else "torch"
        kv_cache = open_kv_cache(
            attend,
            kv_dtype=kv_dtype,
            capacity_tokens=capacity_tokens,
            max_sequences=max_sequences,
            block_tokens=block_tokens,
            backend=backend,
            device=device,
            windowed=windowed,
            lookahead=lookahead,
        )
    if keep:
        each = state_tokens if attend else state_tokens + block_tokens
        states = min(max_sequences, max(capacity_tokens // each, 1))
        store = DeviceStateStore(keep, weights, max_sequences, states, device)
        kv_cache = HybridKvCache(layers, kv_cache, store, capacity_tokens, state_tokens, block_tokens)
    assert kv_cache is not None, "expected a model with layers that attend or keep states"
    return HostKvCache(kv_cache, device) if host_tensors else kv_cache


def by_kernels(layers: Sequence[LayerShape], kv_dtype: str, device: torch.device | str = "cpu") -> bool:
    """Return whether `attn_cuda` has kernels for these layers; torch's operations attend otherwise.

    Args:
        layers: Shapes of the layers.
        kv_dtype: Data type that K and V are stored as.
        device: The GPU, whose blocks must have room; the emulated one has that of an H100.
    """
    return kv_dtype in cuda.KV_DTYPES and cuda.serves(layers, kv_dtype, torch.device(device))


def device_capacity(
    layers: Sequence[MixerShape],
    kv_dtype: str,
    nbytes: int,
    block_tokens: int,
    state_tokens: int,
    device: torch.device,
    windowed: bool = False,
) -> int:
    """Return the tokens, in whole blocks, of a cache by `open_on_device` that takes at most `nbytes`.

    There K and V have memory for all tokens, and so have states for as many sequences as these tokens count as.

    Args:
        layers: Shapes of the layers.
        kv_dtype: Data type that K and V are stored as.
        nbytes: Bytes for K, V and states.
        block_tokens: Tokens of a block.
        state_tokens: Tokens that a state counts as.
        device: The GPU.
        windowed: Whether sequences give up what leaves windows. The tokens are those that all layers keep.
    """
    attend, of_states = attention_shapes(layers), state_bytes(layers)
    if not attend:
        return nbytes // of_states * (state_tokens + block_tokens)
    block = block_bytes(attend, kv_dtype, block_tokens, device, windowed)
    if of_states:
        block += block_tokens * of_states / state_tokens
    return int(nbytes // block) * block_tokens


def block_bytes(
    layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int, device: torch.device, windowed: bool = False
) -> float:
    """Return the bytes of a block, over all layers that attend, of a cache by `open_on_device`."""
    if windowed:
        size, groups = cuda.layer_groups(layers, kv_dtype, block_tokens)
        return size * len(groups)
    if by_kernels(layers, kv_dtype, device):
        return cuda.block_bytes(layers, kv_dtype, block_tokens, device)
    return sum(layer_block_bytes(shape, kv_dtype, block_tokens) for shape in layers)


def torch_bytes(layers: Sequence[MixerShape], kv_dtype: str, device: torch.device | str) -> bool:
    """Return whether torch allocates the memory of K, V and states on a GPU; kernels have their own for K and V."""
    attend = attention_shapes(layers)
    return not attend or not by_kernels(attend, kv_dtype, device)
