"""A KV cache that is larger than its memory: its pages come from tiers, and go there, while others are attended to.

In every layer the rows whose pages are in memory are attended to first, the others as theirs come in. A row has the
same bits whichever rows it is attended to with. What depends on the device is in `streamed.py` for CPUs, and in
`streamed_cuda.py` for GPUs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.base import FloatArray, IntArray, Matrix
from hpcdecode.attention.block_copies import BlockCopy, due_copies
from hpcdecode.attention.native import Native, NativeKvCache
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.pages import Marks, Pages
from hpcdecode.attention.row_groups import Ints, RowsWritten, any_of, ints, tokens_of
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import InvariantViolation


class RotatingKvCache(NativeKvCache[Native], ABC):
    """A `KvCache` as large as its tiers, with as many pages in memory as fit.

    Args:
        native: The KV cache in C++, with frames.
        layers: Shapes of the attention layers.
        kv_dtype: Data type of K and V.
        sizes: Of pages.
        pages: What moves them.

    Attributes:
        sizes: Of pages.
        pages: What moves them.
    """

    def __init__(
        self,
        native: Native,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        sizes: PageSizes,
        pages: Pages,
    ) -> None:
        super().__init__(native, layers, kv_dtype)
        if self.native.frame_bytes != sizes.page_bytes or self.native.ranges != sizes.ranges:
            raise InvariantViolation(
                "frames hold pages", f"{self.native.frame_bytes} bytes for pages of {sizes.page_bytes}"
            )
        self.sizes = sizes
        self.pages = pages
        self._live = np.zeros(sizes.ranges * sizes.range_blocks, np.uint8)
        self._rows: dict[tuple[bytes, bytes, bool], RowsWritten] = {}
        self._copies: list[list[BlockCopy]] = [[] for _ in layers]  # of blocks, left to be made in each layer

    @abstractmethod
    def _extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens in the block table."""

    @abstractmethod
    def _place(self, layer: int) -> None:
        """Tell the native KV cache where the pages of a layer lie."""

    @abstractmethod
    def _append(self, layer: int, kv: Matrix, slots: Ints, counts: Ints, tokens: NDArray[np.int64] | None) -> None:
        """Write K and V of some rows, given their tokens among those of `kv`; None for all."""

    @abstractmethod
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
        """Append and attend to some rows, given their tokens among those of `qkv` and `out`; None for all."""

    @abstractmethod
    def _copy_block(self, source: int, target: int) -> None:
        """Copy a block of the layer that was placed last."""

    def _told(self) -> None:
        """Note that a device has been told what it does with pages that may go from here on."""

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens, as `KvCache.extend`."""
        self._extend(slots, counts)
        if copies := self.native.take_copies():
            for layer in self._copies:
                layer += copies
        self._note_blocks()

    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Write K and V, as `KvCache.append`."""
        run = partial(self._append, layer, kv)
        self._each(layer, ints(slots), ints(counts), False, len(kv), run)

    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Append and attend, as `KvCache.attend`."""
        if len(out) != len(qkv):
            raise ValueError(f"out: expected {len(qkv)} rows, as qkv has, got {len(out)}")
        run = partial(self._attend, layer, qkv, out, sinks)
        self._each(layer, ints(slots), ints(counts), True, len(qkv), run)

    def release(self, slots: IntArray) -> None:
        """Forget sequences, as `KvCache.release`."""
        self.native.release(slots)
        self._settle_copies()
        self._note_blocks()

    def fork(self, src: int, dst: int) -> None:
        """Open a slot with what another holds, as `KvCache.fork`."""
        self.native.fork(src, dst)
        self._rows.clear()

    def truncate(self, slot: int, length: int) -> None:
        """Drop the last positions of a slot, as `KvCache.truncate`."""
        self.native.truncate(slot, length)
        self._settle_copies()
        self._note_blocks()

    def check(self) -> None:
        """Check blocks, as `KvCache.check`, and pages."""
        self.native.check()
        self.pages.check()

    def close(self) -> None:
        """End what moves pages, and give tiers back."""
        self.pages.close()

    def _unpin(self, layer: int, parts: Marks) -> None:
        """Let pages of a layer go, behind what a device has been told to do with them."""
        self._told()
        self.pages.unpin(layer, parts)

    def _note_blocks(self) -> None:
        """Note which blocks are held, after a change."""
        self._rows.clear()
        self.native.mark_used(self._live)
        self.pages.set_live(self._live)

    def _rows_of(self, slots: Ints, counts: Ints, whole: bool) -> RowsWritten:
        """Return what rows need and write."""
        key = slots.tobytes(), counts.tobytes(), whole
        if (rows := self._rows.get(key)) is None:
            held = np.empty(len(slots) * self.sizes.ranges, np.uint8)
            self.native.mark_ranges(slots, counts, whole, held)
            needs = held.astype(np.bool_).reshape(len(slots), self.sizes.ranges)
            needs[counts == 0] = False
            single = counts == 1
            blocks, tokens = np.full(len(slots), -1, np.int32), np.zeros(len(slots), np.int32)
            blocks[single] = self.native.written_blocks(slots[single], counts[single])
            tokens[single] = [(self.native.length(slot) - 1) % self.block_tokens for slot in slots[single].tolist()]
            ends = np.cumsum(counts, dtype=np.int64)
            rows = self._rows[key] = RowsWritten(needs, any_of(needs), ends, bool(single.all()), blocks, tokens)
        return rows

    def _each(
        self,
        layer: int,
        slots: Ints,
        counts: Ints,
        whole: bool,
        tokens: int,
        run: Callable[[Ints, Ints, NDArray[np.int64] | None], None],
    ) -> None:
        """Run over rows in groups, each when its pages are there.

        Args:
            layer: Index of the layer.
            slots: int32 [n].
            counts: int32 [n].
            whole: Whether a row needs all its blocks, not those alone that are written.
            tokens: Rows of the tensors.
            run: Called with slots, counts and tokens of each group, or None for all tokens.
        """
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer: expected 0 to {len(self.layers) - 1}, got {layer}")
        about = self._rows_of(slots, counts, whole)
        total = int(about.ends[-1]) if len(slots) else 0
        if tokens != total:
            raise ValueError(f"rows: expected {total}, the sum of counts, got {tokens}")
        self._copy(layer)
        rows, needs, left = np.arange(len(slots)), about.needs, about.some
        self.pages.pin(layer, left)
        try:
            while len(rows):
                able = self.pages.wait(layer, needs)
                last = bool(able.all())
                group = rows if last else rows[able]
                self._place(layer)
                if len(group) == len(slots):
                    run(slots, counts, None)
                else:
                    run(slots[group], counts[group], tokens_of(about.ends, counts, group))
                self._note_written(layer, about, slots, counts, group)
                if last:
                    break
                rows, needs = rows[~able], needs[~able]
                done = left & ~any_of(needs)
                self._unpin(layer, done)
                left = left & ~done
        finally:
            self._unpin(layer, left)

    def _note_written(
        self, layer: int, about: RowsWritten, slots: Ints, counts: Ints, group: NDArray[np.int64]
    ) -> None:
        """Note what a group of rows wrote at a layer."""
        if about.grow:
            every = len(group) == len(slots)
            blocks, tokens = about.blocks, about.tokens
            self.pages.grew(layer, blocks if every else blocks[group], tokens if every else tokens[group])
            return
        single = group[about.blocks[group] >= 0]
        if len(single):
            self.pages.grew(layer, about.blocks[single], about.tokens[single])
        if len(single) < len(group):
            others = group[about.blocks[group] < 0]
            self.pages.wrote(layer, self.native.written_blocks(slots[others], counts[others]))

    def _copy(self, layer: int) -> None:
        """Make the copies of blocks that forks need, in a layer that is to be written."""
        copies, self._copies[layer] = self._copies[layer], []
        self._make(layer, copies)

    def _make(self, layer: int, copies: Sequence[BlockCopy]) -> None:
        """Make copies of blocks in a layer, in order."""
        if not copies:
            return
        pairs = np.array(copies) // self.sizes.range_blocks
        needed = np.zeros((1, self.sizes.ranges), np.bool_)
        needed[0, pairs.ravel()] = True
        self.pages.pin(layer, needed[0])
        try:
            self.pages.wait(layer, needed)
            self._place(layer)
            for source, target in copies:
                self._copy_block(source, target)
            self.pages.wrote(layer, [target for _, target in copies])
        finally:
            self._unpin(layer, needed[0])

    def _settle_copies(self) -> None:
        """Make the copies that are left of blocks that nothing holds any more, and drop those that nothing needs.

        The bytes of such blocks are as they were until other sequences are given them.
        """
        if not any(self._copies):
            return
        self.native.mark_used(self._live)
        for layer, left in enumerate(self._copies):
            now, self._copies[layer] = due_copies(left, self._live.astype(np.bool_))
            self._make(layer, now)
