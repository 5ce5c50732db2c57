"""Whole KV blocks of sequences, from a KV cache to memory of this host and back, on whatever device the cache is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from hpcdecode._attn_cpu import crc32c
from hpcdecode.attention.base import KvCache
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.cuda import CudaKvCache
from hpcdecode.attention.host import HostKvCache
from hpcdecode.attention.torch_cache import TorchKvCache
from hpcdecode.system.gpus import use_gpu
from hpcdecode.system.swap_tiers import memory_for
from hpcdecode.system.tier import Chunk


class SwappedBlocks(Protocol):
    """Whole blocks of the slots of a KV cache. A block has the bytes of all layers, or of a group of them.

    Attributes:
        block_bytes: Bytes of a block.
    """

    block_bytes: int

    def length(self, slot: int) -> int:
        """Return the tokens that an open slot holds."""

    def held_blocks(self, slot: int) -> int:
        """Return the number of blocks that an open slot holds, which depends on its tokens alone."""

    def memory(self, nbytes: int) -> Chunk:
        """Return memory of this host, uint8 [nbytes], for tiers and for the KV cache's device to copy to and from."""

    def copy_out(self, slot: int, first: int, to: Chunk) -> Callable[[], int]:
        """Copy blocks of a slot to memory; the slot may be released, and its blocks written, after this call.

        Args:
            slot: An open slot.
            first: The first one of its blocks.
            to: uint8, whole blocks.

        Returns:
            What waits until all is in memory, and returns its CRC-32C.
        """

    def copy_in(self, slot: int, first: int, data: Chunk) -> None:
        """Copy blocks back to a slot, and wait for that. It is called beside others, which leave the slot alone."""


def blocks_of(kv_cache: KvCache) -> SwappedBlocks | None:
    """Return the blocks of a KV cache, or None for one of a kind that has none."""
    if isinstance(kv_cache, HostKvCache):
        return blocks_of(kv_cache.kv_cache)
    if isinstance(kv_cache, TorchKvCache):
        blocks = kv_cache.capacity_tokens // kv_cache.block_tokens
        stores = [tensor.view(torch.uint8).view(blocks, -1) for tensor in kv_cache.tensors()]
        return TorchBlocks(kv_cache, stores, partial(_held_by, kv_cache))
    if isinstance(kv_cache, CudaKvCache):
        return TorchBlocks(kv_cache, cast("list[Tensor]", kv_cache.native.memory()), kv_cache.native.blocks)
    return CpuBlocks(kv_cache) if isinstance(kv_cache, CpuKvCache) else None


def _held_by(kv_cache: TorchKvCache, slot: int) -> Sequence[int]:
    """Return the ids of the blocks of a slot."""
    count = -(-kv_cache.length(slot) // kv_cache.block_tokens)
    held: list[int] = kv_cache.table.held(np.array([slot], np.int32))[0][:count].tolist()
    return held


class CpuBlocks:
    """`SwappedBlocks` of a KV cache in this host's memory."""

    def __init__(self, kv_cache: CpuKvCache) -> None:
        self._native, self.length = kv_cache.native, kv_cache.length
        self.block_bytes, self.held_blocks = kv_cache.native.block_bytes, kv_cache.native.held_blocks
        self.copy_in, self.memory = kv_cache.native.copy_in, memory_for

    def copy_out(self, slot: int, first: int, to: Chunk) -> Callable[[], int]:
        """Copy blocks, as `SwappedBlocks.copy_out`; it is done on return."""
        checksum = self._native.copy_out(slot, first, to)
        return lambda: checksum


class TorchBlocks:
    """`SwappedBlocks` of a KV cache whose memory is in tensors of torch, on any device.

    On a GPU blocks are put together on the device, and cross on a stream of their own beside all computing, to and from
    pinned memory.

    Args:
        kv_cache: Whose blocks these are.
        stores: Parts of all blocks, each uint8 [blocks, bytes].
        held: Returns the ids of a slot's blocks.
    """

    def __init__(
        self, kv_cache: TorchKvCache | CudaKvCache, stores: Sequence[Tensor], held: Callable[[int], Sequence[int]]
    ) -> None:
        self._device, self._ids, self._stores = kv_cache.device, held, stores
        self.length = kv_cache.length
        self._widths = [store.shape[1] for store in self._stores]
        self.block_bytes = sum(self._widths)
        self._streams: _Streams | None = None
        if self._device.type == "cuda":
            self._streams = _Streams(torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device))

    def memory(self, nbytes: int) -> Chunk:
        """Return pinned memory, which begins with a page of the system, or any for a cache on CPUs."""
        if self._streams is None:
            return memory_for(nbytes)
        pinned: Chunk = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned

    def held_blocks(self, slot: int) -> int:
        """Return the number of blocks of a slot."""
        return len(self._ids(slot))

    @torch.inference_mode()
    def copy_out(self, slot: int, first: int, to: Chunk) -> Callable[[], int]:
        """Copy blocks, as `SwappedBlocks.copy_out`."""
        host = self._blocks(to)
        held = self._held(slot, first, len(host))
        if self._streams is None:
            host.copy_(self._read(held))
            return partial(crc32c, to)
        gathered, copied = torch.cuda.Event(), torch.cuda.Event()
        with self._streams.behind_computing():
            rows = self._read(held.to(self._device))
            gathered.record()
            host.copy_(rows, non_blocking=True)
            copied.record()
        self._streams.computing.wait_event(gathered)

        def checksum() -> int:
            copied.synchronize()
            return crc32c(to)

        return checksum

    @torch.inference_mode()
    def copy_in(self, slot: int, first: int, data: Chunk) -> None:
        """Copy blocks back, as `SwappedBlocks.copy_in`."""
        host = self._blocks(data)
        held = self._held(slot, first, len(host))
        if self._streams is None:
            self._write(held, host)
            return
        copied = torch.cuda.Event()
        with self._streams.behind_computing():  # what had the blocks before may still be read
            self._write(held.to(self._device), host.to(self._device, non_blocking=True))
            copied.record()
        copied.synchronize()

    def _blocks(self, memory: Chunk) -> Tensor:
        """Return memory as blocks, uint8 [n, block_bytes]."""
        if len(memory) % self.block_bytes:
            raise ValueError(f"blocks: expected a multiple of {self.block_bytes} bytes, got {len(memory)}")
        return torch.from_numpy(memory).view(-1, self.block_bytes)

    def _held(self, slot: int, first: int, count: int) -> Tensor:
        """Return the ids of `count` blocks of a slot, int64 [count], on the host."""
        ids = self._ids(slot)
        have = len(ids)
        if not 0 <= first <= have - count:
            raise ValueError(f"slot {slot}: expected blocks 0 to {have - 1}, got {first} to {first + count - 1}")
        return torch.from_numpy(np.array(ids[first : first + count], np.int64))

    def _read(self, held: Tensor) -> Tensor:
        return torch.cat([store.index_select(0, held) for store in self._stores], 1)

    def _write(self, held: Tensor, rows: Tensor) -> None:
        for store, part in zip(self._stores, rows.split(self._widths, 1), strict=True):
            store.index_copy_(0, held, part)


class _Streams:
    """The stream on which a device computes, and one for copies."""

    def __init__(self, computing: torch.cuda.Stream, copying: torch.cuda.Stream) -> None:
        self.computing, self.copying = computing, copying

    def behind_computing(self) -> torch.cuda.StreamContext:
        """Return a context whose work comes behind all computing so far."""
        use_gpu(self.copying.device)  # tiers have threads of their own
        self.copying.wait_stream(self.computing)
        return torch.cuda.stream(self.copying)
