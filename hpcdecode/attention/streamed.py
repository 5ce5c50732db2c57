"""A KV cache that is larger than its memory: its pages come from tiers, and go there, while others are attended to.

In every layer the rows whose pages are in memory are attended to first, the others as theirs come in. A row has the
same bits whichever rows it is attended to with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hpcdecode._attn_cpu import CapacityError, KvCache
from hpcdecode.attention.base import FloatArray, IntArray, KvCapacityError, Matrix
from hpcdecode.attention.block_copies import BlockCopy, due_copies
from hpcdecode.attention.cpu import native_cache
from hpcdecode.attention.native import NativeKvCache
from hpcdecode.attention.page_sizes import PageSizes
from hpcdecode.attention.page_store import PageStore
from hpcdecode.attention.pages import Pages
from hpcdecode.attention.row_groups import Ints, RowsWritten, any_of, as_array, frames_of, ints, rows_at, tokens_of
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import InvariantViolation
from hpcdecode.system.tier import Tier
from hpcdecode.system.tier_threads import TierThreads


class StreamedKvCache(NativeKvCache[KvCache]):
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

    Attributes:
        pages: What moves.

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
        super().__init__(native, layers, kv_dtype)
        if self.native.frame_bytes != sizes.page_bytes or self.native.ranges != sizes.ranges:
            raise InvariantViolation(
                "frames hold pages", f"{self.native.frame_bytes} bytes for pages of {sizes.page_bytes}"
            )
        self.sizes = sizes
        self.pages = self._open_pages(tiers, cpus)
        self._live = np.zeros(sizes.ranges * sizes.range_blocks, np.uint8)
        self._rows: dict[tuple[bytes, bytes, bool], RowsWritten] = {}
        self._copies: list[list[BlockCopy]] = [[] for _ in layers]  # of blocks, left to be made in each layer

    def _open_pages(self, tiers: Sequence[Tier], cpus: Sequence[int] | None) -> Pages:
        """Return the pages, with the threads that move them."""
        store = PageStore(self.sizes, frames_of(self.native, self.sizes), self.native, tiers, self._row_bytes())
        return Pages(store, TierThreads("kv-pages", cpus, tiers))

    def _row_bytes(self) -> list[int]:
        """Return the bytes of a token at every layer."""
        return [self.native.row_bytes(layer) for layer in range(len(self.layers))]

    @property
    def attend_seconds(self) -> float:
        """Return the seconds spent in `attend` so far, those in which it waited for pages left out."""
        return self.native.attend_seconds

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens, as `KvCache.extend`."""
        try:
            self.native.extend(slots, counts)
        except CapacityError as error:
            raise KvCapacityError(str(error)) from None
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
                self.pages.place(layer, self.native)
                if len(group) == len(slots):
                    run(slots, counts, None)
                else:
                    run(slots[group], counts[group], tokens_of(about.ends, counts, group))
                self._note_written(layer, about, slots, counts, group)
                if last:
                    break
                rows, needs = rows[~able], needs[~able]
                done = left & ~any_of(needs)
                self.pages.unpin(layer, done)
                left = left & ~done
        finally:
            self.pages.unpin(layer, left)

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
            self.pages.place(layer, self.native)
            for source, target in copies:
                self.native.copy_block(source, target)
            self.pages.wrote(layer, [target for _, target in copies])
        finally:
            self.pages.unpin(layer, needed[0])

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
