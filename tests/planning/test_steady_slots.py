"""The memory of sequences that calibrations put into slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode.attention.base import KvCache
from hpcdecode.attention.open import open_layers
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.planning.paged_cache import paged_cache
from hpcdecode.planning.steady_load import SteadyLoad
from hpcdecode.planning.steady_slots import fill_slots
from tests.support.mappings import resident

SHAPES = [LayerShape(kv_heads=8, k_dim=64, v_dim=64, q_heads=8, scale=0.125)] * 4
LOAD = SteadyLoad(64, 1, 60, 6)  # a sequence's steps begin a block of 1 MiB


def open_cache(paged: bool) -> KvCache:
    tokens, slots = 64 * 256, 64
    if paged:
        return paged_cache(SHAPES, "float32", tokens, slots, 1, None, False)
    return open_layers(SHAPES, [], kv_dtype="float32", capacity_tokens=tokens, max_sequences=slots)


@pytest.mark.parametrize("paged", [False, True])
def test_steps_touch_no_memory_that_was_not_touched_before(paged):
    cache, slots = open_cache(paged), np.arange(64, dtype=np.int32)
    fill_slots(cache, SHAPES, slots.tolist(), LOAD, torch.float32)
    before, one = resident(), np.ones(64, np.int32)
    rows = torch.zeros(64, SHAPES[0].kv_columns)
    for _ in range(LOAD.steps + 1):
        cache.extend(slots, one)
        for layer in range(len(SHAPES)):
            cache.append(layer, slots, one, rows)
    assert resident() - before < 16 << 20
