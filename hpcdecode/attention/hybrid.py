"""The KV cache of models some of whose layers keep recurrent states: one for the others, and a store of states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcdecode.attention.base import FloatArray, IntArray, KvCache, KvCapacityError, Matrix
from hpcdecode.attention.shapes import LayerShape, MixerShape, places_of
from hpcdecode.attention.states import StateStore


class HybridKvCache:
    """A `KvCache` whose layers are those of a KV cache and those of a store of states.

    Both take their memory from one budget: an open slot's state counts as `state_tokens` tokens of KV cache. Without
    layers that attend, a slot takes one block more, of any number of tokens.

    Args:
        layers: Shapes of all layers.
        kv_cache: For those that attend, in order; None if there are none.
        states: For those that keep states, in order.
        capacity_tokens: Tokens of K, V and states.
        state_tokens: Tokens that a state counts as.
        block_tokens: Tokens of a block.
    """

    def __init__(
        self,
        layers: Sequence[MixerShape],
        kv_cache: KvCache | None,
        states: StateStore,
        capacity_tokens: int,
        state_tokens: int,
        block_tokens: int,
    ):
        self.layers: tuple[MixerShape, ...] = tuple(layers)
        self.kv_cache, self.states = kv_cache, states
        self.capacity_tokens, self.block_tokens = capacity_tokens, block_tokens
        self._fixed = state_tokens + (block_tokens if kv_cache is None else 0)  # tokens of a slot of any length
        self._attends = [isinstance(shape, LayerShape) for shape in layers]
        self._places = places_of(layers)
        self._open: set[int] = set()

    @property
    def used_tokens(self) -> int:
        """Return the tokens of blocks and states that slots hold."""
        kv = 0 if self.kv_cache is None else self.kv_cache.used_tokens
        return kv + self.states.open_slots * self._fixed

    @property
    def free_blocks(self) -> int:
        """Return the number of free blocks."""
        return (self.capacity_tokens - self.used_tokens) // self.block_tokens

    @property
    def bytes(self) -> int:
        """Return the bytes of K and V, and of the states of open slots."""
        kv = 0 if self.kv_cache is None else self.kv_cache.bytes
        return kv + self.states.open_slots * self.states.state_bytes

    @property
    def bytes_read(self) -> int:
        """Return the bytes of K and V that were read, and of states that were read and written."""
        return self.states.bytes_moved + (0 if self.kv_cache is None else self.kv_cache.bytes_read)

    @property
    def attend_seconds(self) -> float:
        """Return the seconds spent in `attend` so far."""
        return self.states.run_seconds + (0.0 if self.kv_cache is None else self.kv_cache.attend_seconds)

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens, as `KvCache.extend`."""
        new = {int(slot) for slot in slots} - self._open
        self._require(len(new) * self._fixed)
        if self.kv_cache is not None:
            self.kv_cache.extend(slots, counts)
        self.states.extend(slots, counts)
        self._open |= new
        self._require(0)

    def _require(self, tokens: int) -> None:
        """Raise KvCapacityError unless there is room for so many tokens."""
        if self.used_tokens + tokens > self.capacity_tokens:
            raise KvCapacityError(
                f"KV cache full: {tokens} tokens needed for states, {self.capacity_tokens - self.used_tokens} free of "
                f"{self.capacity_tokens}; lower the batch or the token limit, or give it more memory"
            )

    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Write K and V, as `KvCache.append`; a layer that keeps states has none."""
        if self.kv_cache is None or not self._attends[layer]:
            raise ValueError(f"layer {layer} keeps states: expected whole rows for attend")
        self.kv_cache.append(self._places[layer], slots, counts, kv)

    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Attend as `KvCache.attend`, or advance the states of a layer by rows [q | k | v | decay | beta]."""
        if self.kv_cache is not None and self._attends[layer]:
            self.kv_cache.attend(self._places[layer], slots, counts, qkv, out, sinks)
        else:
            self.states.run(self._places[layer], slots, counts, torch.as_tensor(qkv), torch.as_tensor(out))

    def release(self, slots: IntArray) -> None:
        """Forget sequences, as `KvCache.release`."""
        if self.kv_cache is not None:
            self.kv_cache.release(slots)
        self.states.release(slots)
        self._open -= {int(slot) for slot in slots}

    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with what src holds: its blocks, and a copy of its states."""
        self._require(self._fixed)
        if self.kv_cache is not None:
            self.kv_cache.fork(src, dst)
        self.states.fork(src, dst)
        self._open.add(dst)

    def truncate(self, slot: int, length: int) -> None:
        """Drop the last tokens of a slot, which came with one `extend` of 1 + `lookahead` at most, but not its first.

        Raises:
            ValueError: If one of them is in its states.
        """
        self.states.truncate(slot, length)
        if self.kv_cache is not None:
            self.kv_cache.truncate(slot, length)

    def length(self, slot: int) -> int:
        """Return the number of tokens that an open slot has seen."""
        return self.states.length(slot)

    def check(self) -> None:
        """Check both, as `KvCache.check`, and that they hold the same slots.

        Raises:
            RuntimeError: With what does not hold.
        """
        self.states.check()
        if self.kv_cache is not None:
            self.kv_cache.check()
        if self.states.open_slots != len(self._open):
            raise RuntimeError(f"{self.states.open_slots} slots hold states, expected {len(self._open)}")
