"""The simulation of a job's every layer, against runs of the same rows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.page_store import PageStore
from hpcdecode.attention.pages import Pages
from hpcdecode.attention.row_groups import frames_of
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.streamed import StreamedKvCache, row_bytes_of
from hpcdecode.engine.tier_speed import TierSpeed
from hpcdecode.model import load_split
from hpcdecode.planning import lengths
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.job_simulator import JobGroup, simulate_job
from hpcdecode.planning.moves import SimulatedMovers
from hpcdecode.planning.schedule_choice import WINS, choose_schedule, text
from hpcdecode.planning.simulated_ranks import PagedCache, RotatingRank, SwappingRank
from hpcdecode.planning.simulator import SimulatedGroups, simulate
from hpcdecode.planning.tiered import TieredMemory
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.swaps import Swaps
from hpcdecode.system.swap_tiers import TierSpec
from tests.support.rotating import BLOCK_TOKENS, host, sizes_of
from tests.support.samples import run

FREE = Cost(1, [1, 512], [0.0, 0.0], [1, 512], [0.0, 0.0], 0.0, 0.0, 0.0, 0.0, 0.0)
COST = Cost(4, [1, 512], [1e-2, 2e-2], [1, 512], [1e-3, 2e-3], 1e-6, 1e-5, 1e-9, 1e-7, 1e-5)
ROWS = [(70, 12), (150, 8), (130, 30), (20, 6), (190, 40), (64, 17), (200, 25), (90, 3)] * 2


class Recorded(PageStore):
    """A store that notes what it moves."""

    def __init__(self, *args):
        super().__init__(*args)
        self.order = []

    def read(self, move):
        self.order.append(("read", move.page))
        return super().read(move)

    def write(self, move):
        self.order.append(("write", move.page))
        return super().write(move)


class OneByOne(StreamedKvCache):
    """A KV cache whose moves are made when they begin, and count as done when attention waits for them."""

    def _open_pages(self, native, sizes, tiers, cpus):
        self.store = Recorded(sizes, frames_of(native, sizes), native, tiers, row_bytes_of(native, sizes))
        self.movers = SimulatedMovers(lambda: (1.0, 0.0))
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
    group = JobGroup(
        cost, [paged.capacity_tokens], limits, Footprint(BLOCK_TOKENS), lambda: [RotatingRank(paged, cost)]
    )
    outcome = simulate_job(group, lengths.of(*zip(*ROWS, strict=True)))
    assert outcome.tokens == sum(new for _, new in ROWS)
    real = caches[0].store.order
    assert len(real) > 200 and {kind for kind, _ in real} == {"read", "write"}
    assert paged.store.order == real


def group_of(limits, ranks=1, alone=True, capacity=1 << 14, **options):
    def make():
        slots = sum(lane.slots for lane in limits)
        return [SwappingRank(COST, options.get("speed"), options.get("token_bytes", 0.0), slots) for _ in range(ranks)]

    rest = {name: options[name] for name in ("admission", "swaps") if name in options}
    return JobGroup(COST, [capacity] * ranks, limits, Footprint(64), make, alone, **rest)


@pytest.mark.parametrize(("ranks", "alone"), [(1, True), (2, False)])
def test_with_all_in_memory_it_takes_what_the_other_simulator_says(ranks, alone):
    limits = [LaneLimits(16, 2, 31, 256, None)] * (1 if alone else 2)
    rows = lengths.fixed(60, 50, 32)
    found = simulate_job(group_of(limits, ranks, alone), rows)
    cost = msgspec.structs.replace(COST, shared_core_fraction=float(alone))
    other = simulate([SimulatedGroups(cost, [1 << 14] * ranks, limits)], rows)
    assert (found.tokens, found.steps, found.peak_load) == (other.tokens, other.steps, other.peak_load)
    assert found.seconds == pytest.approx(other.seconds, rel=0.05)


def test_sequences_move_to_tiers_by_the_rule_of_jobs():
    """Rows that end early, then rows that do not: some give up their room."""
    new = np.array([4] * 60 + [60] * 20)
    rows = lengths.Lengths(np.full(80, 60), new, np.full(80, 60), np.zeros(80))
    limits = [LaneLimits(24, 1, 59, 256, None, growth=2, least_period=1)]
    made = []

    def swaps(rate):
        made.append(Swaps([1000], 64, [rate]))
        return made[-1]

    sizes = {"admission": "optimistic", "capacity": 64 * 18, "token_bytes": 1e3}
    again = simulate_job(group_of(limits, **sizes), rows)
    assert again.tokens == new.sum() and again.preemptions > 0 and again.recomputed > 0
    fast = {"speed": TierSpeed(1e9, 1e9), "swaps": lambda: swaps(1e6)}
    moved = simulate_job(group_of(limits, **sizes, **fast), rows)
    assert moved.swapped > 0 and moved.swap_in_bytes == moved.swap_out_bytes == 1e3 * moved.swapped
    assert moved.recomputed < again.recomputed and moved.tokens == again.tokens
    slow = {"speed": TierSpeed(1e3, 1e3), "swaps": lambda: swaps(1.0)}
    assert simulate_job(group_of(limits, **sizes, **slow), rows).swapped == 0
    made[1].check()


def test_a_clock_runs_slower_while_threads_move():
    movers, done = SimulatedMovers(lambda: (4.0, 0.5)), []
    movers.move(lambda: 7, done.append)
    movers.compute(2.0)
    assert movers.now == pytest.approx(3.0) and not done  # half of the time a thread that computes has lost its core
    movers.idle(4.0)
    movers.wait(None)
    assert movers.now == pytest.approx(5.0) and done == [7] and movers.waited == pytest.approx(1.0)
    movers.compute(1.0)
    assert movers.now == pytest.approx(6.0)
    with pytest.raises(RuntimeError, match="expected a move"):
        movers.wait(None)


def memory_with(rate):
    layers = [LayerShape(kv_heads=8, k_dim=64, v_dim=64, q_heads=8, scale=0.1)] * 8
    return TieredMemory(layers, "float32", 24 << 20, [TierSpec("host", 96 << 20, "", rate)], False, 4)


@pytest.mark.parametrize(
    ("rate", "slices", "schedule"),
    [(1 << 40, [0.1, 0.12], "fluid"), (1 << 40, [0.001, 0.4], "fixed-f"), (1 << 26, [0.1, 0.12], "fixed-f")],
)
def test_rotation_is_chosen_only_where_it_wins(rate, slices, schedule):
    """Weights that take long to read, work that grows with tokens, and a slow link."""
    cost = Cost(8, [1, 256], slices, [1, 256], [1e-4, 1e-3], 1e-7, 1e-6, 1e-9, 0.0, 0.0)
    memory, rows = memory_with(rate), lengths.fixed(48, 20, 24)
    speeds = {rotates: msgspec.structs.replace(memory, rotates=rotates).speeds() for rotates in (False, True)}
    first, *others = choose_schedule(memory, cost, rows, 1, 0, ["reserve"], speeds)
    assert first.schedule == schedule and first.flags == f"--schedule {schedule} --admission reserve"
    assert all(first.tokens_per_second >= other.tokens_per_second / WINS for other in others)
    assert schedule in text([first, *others])


def test_admission_is_chosen_by_how_rows_end():
    cost = Cost(8, [1, 256], [0.1, 0.12], [1, 256], [1e-4, 1e-3], 1e-7, 1e-6, 1e-9, 0.0, 0.0)
    memory = msgspec.structs.replace(memory_with(0), tiers=[])
    new = np.tile([4, 12], 150)
    early = lengths.Lengths(np.full(300, 20), new, np.full(300, 200), np.zeros(300))
    both = ["reserve", "optimistic"]
    assert choose_schedule(memory, cost, early, 1, 0, both, {False: []})[0].admission == "optimistic"
    exact = lengths.fixed(100, 20, 24)
    assert choose_schedule(memory, cost, exact, 1, 0, both, {False: []})[0].admission == "reserve"
