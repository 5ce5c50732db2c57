"""KV caches larger than their memory, for tests: small pages, and tiers that fail."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from hpcdecode import _attn_cpu
from hpcdecode.attention.page_sizes import PageSizes, page_block_bytes
from hpcdecode.attention.page_store import PageStore
from hpcdecode.attention.streamed import StreamedKvCache
from hpcdecode.system.swap_tiers import ALIGNMENT, FileTier, HostTier

BLOCK_TOKENS = 64


def sizes_of(shapes, kv_dtype, *, ranges, frames, blocks=1, window=2, journal=4 * ALIGNMENT, device=False) -> PageSizes:
    """Return the smallest pages of at least so many blocks, with room for four records in their journals.

    With `device` they are those of the emulated one, which have no journals.
    """
    block = page_block_bytes(shapes, kv_dtype, BLOCK_TOKENS, torch.device("cpu") if device else None)
    journal = 0 if device else journal
    unit = ALIGNMENT // math.gcd(ALIGNMENT, block)
    return PageSizes(len(shapes), block, -(-blocks // unit) * unit, ranges, frames, window, journal, BLOCK_TOKENS)


def rotating(shapes, kv_dtype, sizes, tiers, slots=16, threads=2) -> StreamedKvCache:
    return StreamedKvCache(shapes, kv_dtype, sizes, tiers, slots, BLOCK_TOKENS, threads)


def host(sizes, kind=HostTier):
    return [kind(sizes.layers * sizes.ranges * sizes.chunk_bytes, sizes.chunk_bytes)]


def file(sizes, folder):
    tier = FileTier(str(folder), sizes.layers * sizes.ranges * sizes.chunk_bytes, sizes.chunk_bytes)
    tier.reserve()
    return [tier]


class FaultyTier(HostTier):
    """Memory that fails from its n-th write or read on.

    Attributes:
        fault: `write`, `read` or `bits`; after: how many go well.
    """

    fault, after = "", 0

    def __init__(self, size, chunk_bytes, allocate=None):
        super().__init__(size, chunk_bytes, allocate)
        self._count, self._lock = 0, threading.Lock()

    def _fails(self, kind):
        if kind != self.fault:
            return False
        with self._lock:
            self._count += 1
            return self._count > self.after

    def write(self, chunk, data, at=0):
        if self._fails("write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(chunk, data, at)
        if self._fails("bits"):
            self._held[chunk][at + len(data) // 3] ^= 1

    def read(self, chunk, data, at=0):
        if self._fails("read"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().read(chunk, data, at)


@contextmanager
def spoilt_frames() -> Iterator[None]:
    """Have a frame hold nothing that can be used but what is read of its new page: NaN in every data type."""
    read = PageStore.read

    def spoilt(self: PageStore, move: _attn_cpu.PageMove) -> int:
        self._memory[move.frame][:] = 0xFF
        return read(self, move)

    with patch.object(PageStore, "read", spoilt):
        yield
