"""What a native chain calls at the layers of a decode step: attention over a KV cache, and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

from torch import Tensor

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import IntArray, KvCache
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.cpu_states import CpuStateStore, reserved_bytes
from hpcdecode.attention.hybrid import HybridKvCache
from hpcdecode.attention.shapes import LayerShape, chooses_tokens, places_of, recurrent_shapes
from hpcdecode.attention.sizes import bytes_per_token

StepKvCache = CpuKvCache | HybridKvCache


class MixerStep(Protocol):
    """A step of sequences that have been extended.

    Attributes:
        address: What `Chain.run` takes as attention.
        seconds: Seconds that a thread spent in it, on average.
    """

    @property
    def address(self) -> int: ...  # noqa: D102

    @property
    def seconds(self) -> float: ...  # noqa: D102


def fusable(kv_cache: KvCache) -> TypeGuard[StepKvCache]:
    """Return whether a native chain can call `kv_cache`: it is on this machine's cores, on one NUMA node."""
    parts = (kv_cache.kv_cache, kv_cache.states) if isinstance(kv_cache, HybridKvCache) else (kv_cache,)
    return all(_on_one_node(part) for part in parts if part is not None)


def _on_one_node(part: object) -> bool:
    if isinstance(part, CpuKvCache):
        return len(part.node_free_blocks) == 1
    return isinstance(part, CpuStateStore) and part.native.nodes == 1


def threads_of(kv_cache: StepKvCache) -> int:
    """Return the most threads of a step."""
    if isinstance(kv_cache, CpuKvCache):
        return kv_cache.threads
    assert isinstance(kv_cache.states, CpuStateStore), "expected a KV cache that is fusable"
    return kv_cache.states.native.threads


class MovedBytes(NamedTuple):
    """What a step moves for a sequence.

    Attributes:
        token: Bytes of K and V of a cached token, over all layers.
        states: Bytes of its states, which are read and written.
    """

    token: float
    states: int

    def of(self, lengths: Sequence[int]) -> float:
        """Return the bytes of sequences of so many tokens each."""
        return sum(lengths) * self.token + len(lengths) * self.states


def moved_bytes(kv_cache: StepKvCache) -> MovedBytes:
    """Return what a step moves for a sequence."""
    layers, attends = kv_cache.layers, kv_cache.kv_cache if isinstance(kv_cache, HybridKvCache) else kv_cache
    token = bytes_per_token(layers, attends.kv_dtype) if isinstance(attends, CpuKvCache) else 0.0
    return MovedBytes(token, 2 * reserved_bytes(recurrent_shapes(layers)))


def takes_several(kv_cache: StepKvCache) -> bool:
    """Return whether a step may have several new tokens of a sequence."""
    return isinstance(kv_cache, CpuKvCache) and not chooses_tokens(kv_cache.layers)


def step_of(
    kv_cache: StepKvCache, slots: IntArray, counts: IntArray, dtype: str, sinks: Sequence[Tensor | None]
) -> MixerStep:
    """Return the step of new tokens of each of `slots`.

    Args:
        kv_cache: KV cache that is `fusable`.
        slots: int32 [n], in the order of the rows.
        counts: int32 [n], by how many tokens each was extended; 1 unless the KV cache takes several.
        dtype: float32 or bfloat16, of the rows.
        sinks: For every layer float32 [q_heads], or None.
    """
    if isinstance(kv_cache, CpuKvCache):
        return kv_cache.step_attention(slots, counts, dtype, sinks)
    attends = [isinstance(shape, LayerShape) for shape in kv_cache.layers]
    assert isinstance(kv_cache.states, CpuStateStore), "expected a KV cache that is fusable"
    attention = None
    if isinstance(kv_cache.kv_cache, CpuKvCache):
        own = [s for s, does in zip(sinks, attends, strict=True) if does]
        attention = kv_cache.kv_cache.step_attention(slots, counts, dtype, own)
    states = _attn_cpu.StepStates(kv_cache.states.native, slots)
    places = places_of(kv_cache.layers)
    return _attn_cpu.StepLayers(attention, states, list(zip(attends, places, strict=True)))
