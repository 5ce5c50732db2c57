"""What a KV cache of pages adds to steps, as calibrations measure it."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.attention.page_sizes import PAGE_BYTES
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.model import load_split
from hpcdecode.planning import steady
from hpcdecode.planning.calibrate import Calibration
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.paged_cache import paged_cache
from hpcdecode.planning.steady_load import SteadyLoad
from hpcdecode.ranks.team import assemble
from hpcdecode.system.model_path import find_model

COST = Cost(4, [1, 64, 256], [0.1, 0.2, 0.4], [1, 64], [0.0, 0.0], 0.0, 0.0, 0.0, 0.0, 0.0)


def test_pages_add_to_slices_by_sequences():
    cost = Cost(
        *(getattr(COST, f) for f in COST.__struct_fields__[:10]), paged_tokens=[1, 128], paged_seconds_at=[0.01, 0.02]
    )
    with_pages = cost.with_pages()
    middle = 0.01 + 0.01 * 63 / 127
    assert with_pages.slice_seconds == pytest.approx([0.11, 0.2 + middle, 0.42])  # no more than was measured last
    assert with_pages.logits_seconds_at == cost.logits_seconds_at and COST.with_pages() is COST


def test_nothing_moves_in_a_cache_whose_pages_lie_in_memory():
    shapes = [LayerShape(kv_heads=2, k_dim=16, v_dim=16, q_heads=2, scale=0.3)] * 3
    cache = paged_cache(shapes, "float32", 3000, 40, 2, None, False)
    assert cache.sizes.page_bytes >= PAGE_BYTES and cache.capacity_tokens >= 3000
    slots, counts = np.arange(40, dtype=np.int32), np.full(40, 70, np.int32)
    cache.extend(slots, counts)
    for layer, shape in enumerate(shapes):
        cache.append(layer, slots, counts, np.zeros((40 * 70, shape.kv_columns), np.float32))
    assert cache.pages.counts.bytes_in == cache.pages.counts.bytes_out == 0
    cache.close()


def test_a_calibration_measures_decode_steps_with_pages(monkeypatch):
    made = []
    monkeypatch.setattr(steady, "paged_cache", lambda *args: made.append(args) or paged_cache(*args))
    directory = find_model("demo", {})
    model, team = load_split(directory, dtype="float32"), assemble(None)
    loads = [SteadyLoad(2, 1, 40, 2), SteadyLoad(8, 1, 40, 2), SteadyLoad(2, 1, 160, 2)]
    loads += [SteadyLoad(2, 1, 40, 2, prompt=n, chunk=n // 5) for n in (160, 320)]
    calibration = Calibration(team, model, directory, "float32", loads=loads)
    calibration.measure()
    cost = calibration.profile().cost
    assert cost.paged_tokens == [2, 8] and len(cost.paged_seconds_at) == 2
    assert all(0 <= added < 1.0 for added in cost.paged_seconds_at)  # a few microseconds: less than noise may take away
    assert len(made) == 3  # of the loads that decode
