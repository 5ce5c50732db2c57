"""The simulation of a job's every layer, against runs of the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.attention.page_store import PageStore
from hpcdecode.attention.pages import Pages
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.streamed import StreamedKvCache, _frames
from hpcdecode.engine.tier_speed import TierSpeed
from hpcdecode.model import load_split
from hpcdecode.planning import lengths
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.job_simulator import JobGroup, simulate_job
from hpcdecode.planning.moves import SimulatedMovers
from hpcdecode.planning.simulated_ranks import PagedCache, RotatingRank
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from tests.support.rotating import BLOCK_TOKENS, host, sizes_of
from tests.support.samples import run

FREE = Cost(1, [1, 512], [0.0, 0.0], [1, 512], [0.0, 0.0], 0.0, 0.0, 0.0, 0.0, 0.0)
COST = Cost(4, [1, 512], [1e-2, 2e-2], [1, 512], [1e-3, 2e-3], 1e-6, 1e-5, 1e-9, 1e-7, 1e-5)
ROWS = [(70, 12), (150, 8), (130, 30), (20, 6), (190, 40), (64, 17), (200, 25), (90, 3)] * 2
SHAPES = [LayerShape(kv_heads=2, k_dim=64, v_dim=64, q_heads=4, scale=0.3)] * 4


class Recorded(PageStore):
    """A store that notes what it moves."""

    def __init__(self, *args):
        super().__init__(*args)
        self.order = []

    def read(self, page, *rest):
        self.order.append(("read", page))
        return super().read(page, *rest)

    def write(self, page, *rest):
        self.order.append(("write", page))
        return super().write(page, *rest)


class OneByOne(StreamedKvCache):
    """A KV cache whose moves are made when they begin, and count as done when attention waits for them."""

    def _open_pages(self, tiers, cpus):
        self.store = Recorded(self.sizes, _frames(self.native, self.sizes), self.native, tiers)
        self.movers = SimulatedMovers(lambda: (1.0, 0.0), 1)
        return Pages(self.store, self.movers)


@pytest.mark.parametrize(("lanes", "frames"), [(1, 30), (1, 22), (2, 30)])
def test_pages_move_in_the_order_of_a_real_run(checkpoint, lanes, frames):
    """A model that generates for rows, and a simulation that knows their lengths alone."""
    model = load_split(checkpoint("llama3"), dtype="float32")
    draw, caches = np.random.default_rng(1), []
    sizes = sizes_of(model.attends, "float32", ranges=16, frames=frames, blocks=2)

    def cache(shapes, slots):
        caches.append(OneByOne(shapes, "float32", sizes, host(sizes), slots, BLOCK_TOKENS, 2))
        return caches[-1]

    params = [SamplingParams(ignore_eos=True, max_tokens=new) for _, new in ROWS]
    prompts = [
        Prompt(line, str(line), draw.integers(5, 200, prompt).tolist(), params[line])
        for line, (prompt, _) in enumerate(ROWS)
    ]
    done, worker = run(model, prompts, lanes=lanes, cache=cache)
    assert len(done) == len(ROWS)

    speed = TierSpeed(sizes.page_bytes, sizes.page_bytes)
    limits = [scheduler.limits for scheduler in worker.schedulers]
    pages = [(sizes.layers * sizes.ranges, speed)]
    paged = PagedCache(model.attends, "float32", sizes, pages, sum(lane.slots for lane in limits), BLOCK_TOKENS)
    paged.store.order = []
    cost = Cost(len(model.attends), *(getattr(FREE, name) for name in FREE.__struct_fields__[1:10]))
    group = JobGroup(cost, [paged.capacity_tokens], limits, BLOCK_TOKENS, lambda: [RotatingRank(paged, cost)])
    outcome = simulate_job(group, lengths.of(*zip(*ROWS, strict=True)))
    assert outcome.tokens == sum(new for _, new in ROWS)
    real = caches[0].store.order
    assert len(real) > 200 and {kind for kind, _ in real} == {"read", "write"}
    assert paged.store.order == real
