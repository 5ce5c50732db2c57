"""The block table of a paged KV cache in Python: which sequence holds which blocks. `native/kv` has one in C++."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.base import IntArray, KvCapacityError

Ints = NDArray[np.int32]


class BlockTable:
    """Blocks of slots, as `KvCache` describes them.

    Args:
        block_tokens: Tokens of a block.
        capacity_tokens: Tokens to hold, rounded up to whole blocks.
        max_sequences: Slots are 0 to max_sequences - 1.

    Attributes:
        block_tokens: Tokens of a block.
        blocks: Number of blocks.
        lengths: Positions of every slot, int64 [max_sequences]; 0 if it is not open.
        version: Changes with every change.

    Raises:
        ValueError: If an argument is bad.
    """

    def __init__(self, block_tokens: int, capacity_tokens: int, max_sequences: int) -> None:
        sizes = {"block_tokens": block_tokens, "capacity_tokens": capacity_tokens, "max_sequences": max_sequences}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        self.block_tokens = block_tokens
        self.blocks = -(-capacity_tokens // block_tokens)
        self.lengths = np.zeros(max_sequences, np.int64)
        self.version = 1
        self._open = np.zeros(max_sequences, np.bool_)
        self._held = np.zeros((max_sequences, 1), np.int32)  # block ids of every slot, in order
        self._free = list(range(self.blocks - 1, -1, -1))
        self._references = np.zeros(self.blocks, np.int32)

    @property
    def capacity_tokens(self) -> int:
        """Return the tokens of all blocks."""
        return self.blocks * self.block_tokens

    @property
    def free_blocks(self) -> int:
        """Return the number of free blocks."""
        return len(self._free)

    @property
    def used_tokens(self) -> int:
        """Return the tokens of the blocks that slots hold."""
        return self.capacity_tokens - self.free_blocks * self.block_tokens

    def extend(self, slots: IntArray, counts: IntArray) -> list[tuple[int, int]]:
        """Make room for new tokens, as `KvCache.extend`.

        Returns:
            Blocks to copy before they are written, as (from, to): the partly filled last ones of forks.
        """
        own, new = self._sequences(slots, counts)
        for slot, count in zip(own[new < 0], new[new < 0], strict=True):
            raise ValueError(f"count {count} of slot {slot} is negative")
        have, want = self._blocks_for(self.lengths[own]), self._blocks_for(self.lengths[own] + new)
        forked = self._forked_tails(own[new > 0])
        needed = int((want - have).sum()) + len(forked)
        if needed > len(self._free):
            raise KvCapacityError(
                f"KV cache full: {needed * self.block_tokens} tokens needed, {len(self._free) * self.block_tokens} "
                f"free of {self.capacity_tokens}; lower the batch or the token limit, or give it more memory"
            )
        self.version += 1
        copies = [self._replace_tail(slot) for slot in forked]
        self._widen(int(want.max(initial=0)))
        for i in np.flatnonzero(want > have):
            self._held[own[i], have[i] : want[i]] = [self._take() for _ in range(want[i] - have[i])]
        self.lengths[own] += new
        self._open[own] = True
        return copies

    def release(self, slots: IntArray) -> None:
        """Forget sequences, as `KvCache.release`."""
        own = self._distinct(int32("slots", slots))
        for slot in own.tolist():
            self._require_open(slot)
        for slot in own.tolist():
            self.truncate(slot, 0)
            self._open[slot] = False

    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with the blocks of slot src."""
        self._require_open(src)
        self._require_slot(dst)
        if self._open[dst]:
            raise ValueError(f"slot {dst} is open; release it before forking into it")
        self.version += 1
        self._open[dst], self.lengths[dst] = True, self.lengths[src]
        count = int(self._blocks_for(self.lengths[src]))
        self._held[dst, :count] = self._held[src, :count]
        self._references[self._held[src, :count]] += 1

    def truncate(self, slot: int, length: int) -> None:
        """Drop the positions of a slot from `length` on."""
        now = self.length(slot)
        if not 0 <= length <= now:
            raise ValueError(f"slot {slot}: cannot truncate length {now} to {length}")
        self.version += 1
        first, last = self._blocks_for(np.array([length, now])).tolist()
        for block in self._held[slot, first:last][::-1].tolist():
            self._drop(block)
        self.lengths[slot] = length

    def length(self, slot: int) -> int:
        """Return the number of positions that an open slot holds."""
        self._require_open(slot)
        return int(self.lengths[slot])

    def held(self, slots: Ints) -> Ints:
        """Return the block ids of open slots in order, int32 [n, most]; what follows a slot's own is any block."""
        most = int(self._blocks_for(self.lengths[slots]).max(initial=1))
        return self._held[slots, : max(most, 1)]

    def written(self, slots: IntArray, counts: IntArray) -> tuple[Ints, Ints]:
        """Return slots and counts whose last positions are to be written, int32 [n] each.

        Raises:
            ValueError: If a slot is not open or too short, or a fork shares what is to be written.
        """
        own, new = self._sequences(slots, counts)
        for slot, count in zip(own.tolist(), new.tolist(), strict=True):
            length = self.length(slot)
            if not 0 <= count <= length:
                raise ValueError(f"slot {slot}: count {count} does not fit its length {length}")
            first, last = self._blocks_for(np.array([length - count + 1, length])).tolist()
            if count and (self._references[self._held[slot, first - 1 : last]] > 1).any():
                raise ValueError(f"slot {slot}: the last {count} positions are shared with a fork; extend it first")
        return own, new

    def check(self) -> None:
        """Check that every block is free or referenced, and counted right.

        Raises:
            RuntimeError: With the block that is wrong.
        """
        listed, held = Counter(self._free), Counter[int]()
        for slot in np.flatnonzero(self._open).tolist():
            held.update(self._held[slot, : int(self._blocks_for(self.lengths[slot]))].tolist())
        for block, references in enumerate(self._references.tolist()):
            if held[block] != references or listed[block] != (references == 0):
                raise RuntimeError(
                    f"block {block}: {references} references, {held[block]} holders, {listed[block]} free"
                )

    def _forked_tails(self, slots: Ints) -> list[int]:
        """Return those of `slots` whose last block is partly filled and shared; the last that writes it keeps it."""
        lengths = self.lengths[slots]
        tails = self._held[slots, np.maximum(lengths - 1, 0) // self.block_tokens]
        shared = (lengths % self.block_tokens > 0) & (self._references[tails] > 1)
        leaving, found = Counter[int](), []
        for slot, tail in zip(slots[shared].tolist(), tails[shared].tolist(), strict=True):
            if self._references[tail] - leaving[tail] > 1:
                leaving[tail] += 1
                found.append(slot)
        return found

    def _replace_tail(self, slot: int) -> tuple[int, int]:
        last = int(self.lengths[slot] - 1) // self.block_tokens
        old, new = int(self._held[slot, last]), self._take()
        self._held[slot, last] = new
        self._drop(old)
        return old, new

    def _blocks_for(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-tokens // self.block_tokens)

    def _widen(self, columns: int) -> None:
        rows, width = self._held.shape
        if columns > width:
            wider = np.zeros((rows, max(columns, 2 * width)), np.int32)
            wider[:, :width] = self._held
            self._held = wider

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)

    def _sequences(self, slots: IntArray, counts: IntArray) -> tuple[Ints, Ints]:
        own, new = int32("slots", slots), int32("counts", counts)
        if len(own) != len(new):
            raise ValueError(f"slots and counts: expected the same length, got {len(own)} and {len(new)}")
        return self._distinct(own), new

    def _distinct(self, slots: Ints) -> Ints:
        for slot in slots.tolist():
            self._require_slot(slot)
        if len(set(slots.tolist())) != len(slots):
            raise ValueError("a slot is given twice in one call")
        return slots

    def _require_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self.lengths):
            raise ValueError(f"slot {slot} is out of range: expected 0 to {len(self.lengths) - 1}")

    def _require_open(self, slot: int) -> None:
        self._require_slot(slot)
        if not self._open[slot]:
            raise ValueError(f"slot {slot} is not open; extend it first")


def int32(name: str, values: IntArray) -> Ints:
    """Return slots or counts as int32 [n]; raise TypeError or ValueError if they are something else."""
    found = np.asarray(values)
    if not isinstance(values, list | tuple) and found.dtype != np.int32:
        raise TypeError(f"{name}: expected int32, got {found.dtype}")
    if found.ndim != 1:
        raise ValueError(f"{name}: expected 1 dimension, got {found.ndim}")
    return found.astype(np.int32, copy=False)
