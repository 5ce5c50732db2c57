"""A KV cache on a GPU that is larger than its memory (see `rotating.py`).

What moves a page is a thread of this host: it waits until the page is copied, and copies come behind what the GPU was
told to do with the frame before. So the host's view of pages is the GPU's, and attention waits for pages on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import FloatArray, IntArray, Matrix
from hpcdecode.attention.cuda import CudaKvCache
from hpcdecode.attention.device_page_store import DevicePageStore
from hpcdecode.attention.frame_copies import frame_copies
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.pages import Pages
from hpcdecode.attention.rotating import RotatingKvCache
from hpcdecode.attention.row_groups import Ints
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.system.tier import Tier
from hpcdecode.system.tier_threads import TierThreads
from hpcdecode.system.uploads import upload

if TYPE_CHECKING:
    from hpcdecode import _attn_cuda


class StreamedCudaKvCache(RotatingKvCache["_attn_cuda.KvCache"]):
    """A `KvCache` on a GPU as large as its tiers, with as many pages in the GPU's memory as fit.

    Tensors are on the device; calls put their work on its current stream.

    Args:
        layers: Shapes of the attention layers.
        kv_dtype: One of those of `attention.cuda`.
        sizes: Of pages, without journals.
        tiers: With chunks of one page each.
        max_sequences: Slots are 0 to max_sequences - 1.
        block_tokens: Tokens of a block.
        device: A CUDA device, or the CPU for the emulation.
        cpus: Of the threads that move pages, or None for those of the caller.

    Raises:
        torch.OutOfMemoryError: If the device has no room.
        ValueError: If heads or kv_dtype have no kernels.
        UserError: If this hpcdecode was built without CUDA.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        sizes: PageSizes,
        tiers: Sequence[Tier],
        max_sequences: int,
        block_tokens: int,
        device: torch.device | str = "cuda",
        cpus: Sequence[int] | None = None,
    ) -> None:
        room = sizes.ranges * sizes.range_blocks * block_tokens, max_sequences, block_tokens
        self._plain = CudaKvCache(layers, kv_dtype, *room, device, sizes.range_blocks, sizes.frames)
        self.device = self._plain.device
        own: _attn_cuda.KvCache = self._plain.native
        self._blocks: Tensor = torch.as_tensor(own.memory()[0])  # uint8 [frames * range_blocks, block_bytes]
        self._frames = frame_copies(self._blocks.view(sizes.frames, sizes.page_bytes))
        store = DevicePageStore(sizes, self._frames, tiers)
        super().__init__(own, layers, kv_dtype, sizes, Pages(store, TierThreads("kv-pages", cpus, tiers)))
        self._placed: list[int] = []

    @property
    def attend_seconds(self) -> float:
        """Return the seconds that the device took for `attend`; wait for it."""
        return self._plain.attend_seconds

    def _extend(self, slots: IntArray, counts: IntArray) -> None:
        self._plain.extend(slots, counts)

    def _place(self, layer: int) -> None:
        self._placed = self.pages.frames(layer)
        self.native.place_pages(self._placed)

    def _append(self, layer: int, kv: Matrix, slots: Ints, counts: Ints, tokens: NDArray[np.int64] | None) -> None:
        some = kv if tokens is None else torch.as_tensor(kv).index_select(0, self._index(tokens))
        self._plain.append(layer, slots, counts, some)

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
            self._plain.attend(layer, slots, counts, qkv, out, sinks)
            return
        rows, results, index = torch.as_tensor(qkv), torch.as_tensor(out), self._index(tokens)
        result = results.new_empty(len(index), results.shape[1])
        self._plain.attend(layer, slots, counts, rows.index_select(0, index), result, sinks)
        results.index_copy_(0, index, result)

    def _index(self, tokens: NDArray[np.int64]) -> Tensor:
        (index,) = upload(self.device, tokens)
        return index

    def _copy_block(self, source: int, target: int) -> None:
        self._block(target).copy_(self._block(source), non_blocking=True)

    def _block(self, block: int) -> Tensor:
        """Return a block of the layer that was placed last, uint8 [block_bytes]."""
        frame, index = self._placed[block // self.sizes.range_blocks], block % self.sizes.range_blocks
        return self._blocks[frame * self.sizes.range_blocks + index]

    def _told(self) -> None:
        self._frames.told()
