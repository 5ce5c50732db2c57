"""A KV cache on a device for tensors in this host's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcdecode.attention.base import FloatArray, IntArray, KvCache, Matrix
from hpcdecode.attention.shapes import MixerShape


class HostKvCache:
    """A `KvCache` over one on a device. Matrices must stay as they are until the device has read them.

    Args:
        kv_cache: The one on the device.
        device: Where its matrices are.
    """

    def __init__(self, kv_cache: KvCache, device: torch.device | str) -> None:
        self.kv_cache, self.device = kv_cache, torch.device(device)
        self.layers: Sequence[MixerShape] = kv_cache.layers
        self.capacity_tokens, self.block_tokens = kv_cache.capacity_tokens, kv_cache.block_tokens
        self.extend, self.release, self.fork = kv_cache.extend, kv_cache.release, kv_cache.fork
        self.truncate, self.length, self.check = kv_cache.truncate, kv_cache.length, kv_cache.check

    @property
    def used_tokens(self) -> int:
        """Return the tokens of the blocks that slots hold."""
        return self.kv_cache.used_tokens

    @property
    def free_blocks(self) -> int:
        """Return the number of free blocks."""
        return self.kv_cache.free_blocks

    @property
    def bytes(self) -> int:
        """Return the bytes of the arena."""
        return self.kv_cache.bytes

    @property
    def bytes_read(self) -> int:
        """Return the bytes that `attend` has read so far."""
        return self.kv_cache.bytes_read

    @property
    def attend_seconds(self) -> float:
        """Return the seconds that the device took for `attend`."""
        return self.kv_cache.attend_seconds

    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Copy to the device, then write K and V."""
        self.kv_cache.append(layer, slots, counts, torch.as_tensor(kv).to(self.device, non_blocking=True))

    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Copy to the device, append and attend, then copy back; what is there already is not copied."""
        result = torch.as_tensor(out)
        if result.device.type == self.device.type:
            self.kv_cache.attend(layer, slots, counts, torch.as_tensor(qkv), result, sinks)
            return
        there = torch.empty(result.shape, dtype=result.dtype, device=self.device)
        rows = torch.as_tensor(qkv).to(self.device, non_blocking=True)
        self.kv_cache.attend(layer, slots, counts, rows, there, sinks)
        result.copy_(there, non_blocking=True)
