"""A KV cache on CPUs that is larger than its memory (see `rotating.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hpcdecode._attn_cpu import CapacityError, KvCache
from hpcdecode.attention.base import FloatArray, IntArray, KvCapacityError, Matrix
from hpcdecode.attention.cpu import native_cache
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.page_store import PageStore
from hpcdecode.attention.pages import Pages
from hpcdecode.attention.rotating import RotatingKvCache
from hpcdecode.attention.row_groups import Ints, as_array, frames_of, rows_at
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.system.tier import Tier
from hpcdecode.system.tier_threads import TierThreads


class StreamedKvCache(RotatingKvCache[KvCache]):
    """A `KvCache` on CPUs as large as its tiers, with as many pages in memory as fit.

    Tensors are CPU torch tensors (float32, bfloat16) or numpy float32 arrays.

    Args:
        layers: Shapes of the attention layers.
        kv_dtype: One of KV_DTYPES.
        sizes: Of pages.
        tiers: With chunks of one page and its journal each.
        max_sequences: Slots are 0 to max_sequences - 1.
        block_tokens: Tokens of a block.
        threads: Number of threads, the calling one included.
        cpus: One CPU per thread to pin workers to, or None.
        team: True to run on torch's OpenMP threads.

    Raises:
        UserError: If the system maps no more memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        sizes: PageSizes,
        tiers: Sequence[Tier],
        max_sequences: int,
        block_tokens: int,
        threads: int = 1,
        cpus: Sequence[int] | None = None,
        team: bool = False,
    ) -> None:
        room = sizes.ranges * sizes.range_blocks * block_tokens, max_sequences, block_tokens
        pinned: list[int] = list(cpus or ())
        native = native_cache(
            layers, kv_dtype, *room, threads, pinned, [], team, range_blocks=sizes.range_blocks, frames=sizes.frames
        )
        super().__init__(native, layers, kv_dtype, sizes, self._open_pages(native, sizes, tiers, cpus))

    def _open_pages(
        self, native: KvCache, sizes: PageSizes, tiers: Sequence[Tier], cpus: Sequence[int] | None
    ) -> Pages:
        """Return the pages, with the threads that move them."""
        store = PageStore(sizes, frames_of(native, sizes), native, tiers, row_bytes_of(native, sizes))
        return Pages(store, TierThreads("kv-pages", cpus, tiers))

    @property
    def attend_seconds(self) -> float:
        """Return the seconds spent in `attend` so far, those in which it waited for pages left out."""
        return self.native.attend_seconds

    def _extend(self, slots: IntArray, counts: IntArray) -> None:
        try:
            self.native.extend(slots, counts)
        except CapacityError as error:
            raise KvCapacityError(str(error)) from None

    def _place(self, layer: int) -> None:
        self.pages.place(layer, self.native)

    def _append(self, layer: int, kv: Matrix, slots: Ints, counts: Ints, tokens: NDArray[np.int64] | None) -> None:
        self.native.append(layer, slots, counts, kv if tokens is None else rows_at(kv, tokens))

    def _attend(
        self,
        layer: int,
        qkv: Matrix,
        out: Matrix,
        sinks: FloatArray | None,
        slots: Ints,
        counts: Ints,
        tokens: NDArray[np.int64] | None,
    ) -> None:
        if tokens is None:
            self.native.attend(layer, slots, counts, qkv, out, sinks)
            return
        some = rows_at(qkv, tokens)
        result = torch.empty(len(tokens), out.shape[1], dtype=some.dtype)
        self.native.attend(layer, slots, counts, some, result, sinks)
        as_array(out)[tokens] = as_array(result)

    def _copy_block(self, source: int, target: int) -> None:
        self.native.copy_block(source, target)


def row_bytes_of(native: KvCache, sizes: PageSizes) -> list[int]:
    """Return the bytes of a token at every layer."""
    return [native.row_bytes(layer) for layer in range(sizes.layers)]
