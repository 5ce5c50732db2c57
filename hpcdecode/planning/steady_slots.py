"""The sequences of lanes in their steady state, in the slots of KV caches that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import KvCache
from hpcdecode.attention.hybrid import HybridKvCache
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import MixerShape, attention_shapes
from hpcdecode.planning.steady_load import SteadyLoad

_FILL = 1024  # random rows that are repeated in the KV cache


def places_of(load: SteadyLoad, parts: int) -> NDArray[np.int32]:
    """Return R-rank and slot of a lane's sequences, [n, 2]; prompts take slots from the other end.

    Args:
        load: Of the lane.
        parts: Number of R-ranks that its sequences are spread over.
    """
    i = np.arange(load.lane_batch)
    return np.stack([i % parts, load.limits.slots - 1 - i], axis=1).astype(np.int32)


def fill_slots(
    kv_cache: KvCache, shapes: Sequence[MixerShape], slots: Iterable[int], load: SteadyLoad, dtype: torch.dtype
) -> None:
    """Put a sequence of the load's context into each of the slots, whose memory is touched for all steps.

    Args:
        kv_cache: Whose slots are empty.
        shapes: Of its layers.
        slots: To fill.
        load: That is run next.
        dtype: Of activations.
    """
    widest = max((s.kv_columns for s in attention_shapes(shapes)), default=0)
    random = torch.randn(_FILL, widest).to(dtype)
    every = list(slots)
    for slot in every:
        _fill(kv_cache, shapes, slot, load.context + load.steps + 1, random)
    for slot in every:  # only now: the next slot would take the blocks that this one gives back
        truncate_slot(kv_cache, slot, load.context)


def truncate_slot(kv_cache: KvCache, slot: int, length: int) -> None:
    """Let a slot have `length` tokens of K and V; its states stay."""
    if (attend := attention_of(kv_cache)) is not None:
        attend.truncate(slot, length)


def attention_of(kv_cache: KvCache) -> KvCache | None:
    """Return the KV cache of the layers that attend, or None if all keep states."""
    return kv_cache.kv_cache if isinstance(kv_cache, HybridKvCache) else kv_cache


def _fill(kv_cache: KvCache, shapes: Sequence[MixerShape], slot: int, tokens: int, random: Tensor) -> None:
    """Put a sequence of `tokens` tokens into a slot, rows of `random` repeated.

    States have seen one token, of zeros: they take the same memory and time however many they have seen.
    """
    slots, one, attend = np.array([slot], np.int32), np.array([1], np.int32), attention_of(kv_cache)
    kv_cache.extend(slots, one)
    for layer, shape in enumerate(shapes):
        if isinstance(shape, RecurrentShape):
            row = random.new_zeros(1, shape.row_columns)
            kv_cache.attend(layer, slots, one, row, row.new_empty(1, shape.out_columns))
        else:
            kv_cache.append(layer, slots, one, random[:1, : shape.kv_columns].contiguous())
    if attend is None:
        return
    for start in range(1, tokens, _FILL):
        count = min(_FILL, tokens - start)
        counts = np.array([count], np.int32)
        attend.extend(slots, counts)
        for layer, own in enumerate(attention_shapes(shapes)):
            attend.append(layer, slots, counts, random[:count, : own.kv_columns].contiguous())
