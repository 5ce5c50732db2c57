"""Which sequences have recurrent states on a device, where they lie, and how far each layer's have come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.base import IntArray, KvCapacityError
from hpcdecode.attention.block_table import int32


class StateSlots:
    """Places of open slots.

    Args:
        layers: Number of layers.
        max_sequences: Slots are 0 to max_sequences - 1.
        states: Number of places.
        lookahead: Tokens by which slots may be truncated.

    Attributes:
        version: Changes when a slot opens or closes.

    Raises:
        ValueError: If an argument is bad.
    """

    def __init__(self, layers: int, max_sequences: int, states: int, lookahead: int = 0) -> None:
        for name, size in (("max_sequences", max_sequences), ("states", states)):
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        self.version = 0
        self._states, self._lookahead = states, lookahead
        self._places = np.full(max_sequences, -1)  # -1: not open
        self._lengths = np.zeros(max_sequences, np.int64)
        self._seen = np.zeros((layers, max_sequences), np.int64)  # tokens that a layer has advanced by
        self._held = np.zeros((layers, max_sequences), np.int64)  # those of them that are not in its state
        self._free = list(range(states - 1, -1, -1))

    @property
    def open_slots(self) -> int:
        """Return the number of open slots."""
        return self._states - len(self._free)

    def extend(self, slots: IntArray, counts: IntArray) -> NDArray[np.int64]:
        """Advance slots by counts, as `StateStore.extend`; return the places of those that open.

        Raises:
            KvCapacityError: If there are too few places; nothing changes.
        """
        own, new = self._sequences(slots, counts)
        for slot, count in zip(own[new < 0], new[new < 0], strict=True):
            raise ValueError(f"count {count} of slot {slot} is negative")
        opening = own[self._places[own] < 0]
        if len(opening) > len(self._free):
            raise KvCapacityError(
                f"recurrent states: {len(opening)} needed, {len(self._free)} free of {self._states}; lower the batch"
            )
        for slot in opening.tolist():
            self._open(slot)
        self._lengths[own] += new
        return self._places[opening]

    def due(self, layer: int, slots: IntArray, counts: IntArray) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return slots and counts that a layer is to advance by, int32 [n].

        Raises:
            ValueError: If these are not the tokens that it has not seen.
        """
        if not 0 <= layer < len(self._seen):
            raise ValueError(f"layer {layer} is out of range: expected 0 to {len(self._seen) - 1}")
        own, new = self._sequences(slots, counts)
        for slot in own[self._places[own] < 0].tolist():
            self._require_open(slot)
        wrong = (self._seen[layer, own] + new != self._lengths[own]) | (new < 0)
        for slot, count in zip(own[wrong].tolist(), new[wrong].tolist(), strict=True):
            raise ValueError(
                f"slot {slot}: layer {layer} has seen {self._seen[layer, slot]} of {self._lengths[slot]} tokens, so "
                f"count {count} does not fit"
            )
        return own, new

    def advance(self, layer: int, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Count what a layer has advanced by."""
        self._seen[layer, slots] += counts
        some = counts > 0
        self._held[layer, slots[some]] = self.droppable(counts[some])

    def held(self, layer: int, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return how many of the tokens that a layer has seen are not in its states."""
        held: NDArray[np.int64] = self._held[layer, slots]
        return held

    def droppable(self, counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many of the tokens of a call may be dropped again: those of a guess, which has one before it."""
        guesses: NDArray[np.int32] = np.where(counts <= self._lookahead + 1, np.maximum(counts - 1, 0), 0)
        return guesses

    def truncate(self, slot: int, length: int) -> None:
        """Drop the last tokens of a slot, as `StateStore.truncate`."""
        self._require_open(slot)
        dropped = int(self._lengths[slot]) - length
        if not 0 <= dropped <= self._held[:, slot].min():
            raise ValueError(
                f"slot {slot}: cannot truncate length {self._lengths[slot]} to {length}: "
                f"{self._lengths[slot] - self._held[:, slot].min()} tokens are in its states"
            )
        self._lengths[slot] = length
        for of_layers in (self._seen, self._held):
            of_layers[:, slot] -= dropped

    def release(self, slots: IntArray) -> None:
        """Close slots."""
        own, _ = self._sequences(slots, np.zeros(len(slots), np.int32))
        for slot in own.tolist():
            self._require_open(slot)
        for slot in own.tolist():
            self._free.append(int(self._places[slot]))
        self._places[own] = -1
        self._lengths[own] = 0
        self.version += 1

    def fork(self, src: int, dst: int) -> tuple[int, int]:
        """Open slot dst as a copy of slot src; return their places."""
        self._require_open(src)
        self._require_slot(dst)
        if self._places[dst] >= 0:
            raise ValueError(f"slot {dst} is open; release it before forking into it")
        if not self._free:
            raise KvCapacityError(f"recurrent states: 1 needed, 0 free of {self._states}; lower the batch")
        self._open(dst)
        self._lengths[dst] = self._lengths[src]
        for of_layers in (self._seen, self._held):
            of_layers[:, dst] = of_layers[:, src]
        return int(self._places[src]), int(self._places[dst])

    def places(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the places of open slots."""
        return self._places[slots]

    def length(self, slot: int) -> int:
        """Return the number of tokens that an open slot has seen."""
        self._require_open(slot)
        return int(self._lengths[slot])

    def check(self) -> None:
        """Raise RuntimeError unless every place is free or has one open slot."""
        places = sorted([*self._free, *self._places[self._places >= 0].tolist()])
        if places != list(range(self._states)):
            raise RuntimeError(f"places of states: {len(self._free)} free, {places} in all of {self._states}")

    def _open(self, slot: int) -> None:
        self._places[slot] = self._free.pop()
        self._seen[:, slot] = self._held[:, slot] = 0
        self.version += 1

    def _sequences(self, slots: IntArray, counts: IntArray) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        own, new = int32("slots", slots), int32("counts", counts)
        if len(own) != len(new):
            raise ValueError(f"slots and counts: expected the same length, got {len(own)} and {len(new)}")
        for slot in own.tolist():
            self._require_slot(slot)
        if len(set(own.tolist())) != len(own):
            raise ValueError("a slot is given twice in one call")
        return own, new

    def _require_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self._places):
            raise ValueError(f"slot {slot} is out of range: expected 0 to {len(self._places) - 1}")

    def _require_open(self, slot: int) -> None:
        self._require_slot(slot)
        if self._places[slot] < 0:
            raise ValueError(f"slot {slot} is not open; extend it first")
