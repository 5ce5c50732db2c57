"""Schedules of one device: memory, every token of every request, who gives way, and the time an iteration takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdecode.errors import UserError
from hpcdecode.planning import lengths
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.hardware import DEVICES, device
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.servers import SERVING
from hpcdecode.planning.servers.base import KvBlocks, ServedRequest, ServerLimits
from hpcdecode.planning.servers.packing import packed
from hpcdecode.planning.serving import Server, of_device, serve

COST = Cost(2, [1, 512], [1e-3, 2e-3], [1, 512], [1e-4, 2e-4], 1e-6, 0.0, 1e-8, 0.0, 0.0)
SERVER = Server(COST, 1 << 20, 1e-6)
SIZE = ModelSize.alike(
    layers=32,
    layer_weights=6_500_000_000,
    head_weights=131_000_000,
    q_columns=4096,
    k_columns=4096,
    v_columns=4096,
)


class Device:
    """Runs a schedule for requests (arrival, prompt, new, most), and looks at its memory in every iteration."""

    def __init__(self, schedule, rows, tokens, block=4, seqs=6, batched=64, swap_space=float("inf")):
        self.memory = KvBlocks(tokens, block)
        self.policy = SERVING[schedule](ServerLimits(seqs, batched, swap_space), self.memory, SERVER)
        self.requests = [ServedRequest(i, p, most, float(at)) for i, (at, p, _, most) in enumerate(rows)]
        self.new = [new for _, _, new, _ in rows]
        self.refused, self.ended = [], []
        self.ran = [[] for _ in rows]  # tokens, iteration by iteration
        self.work, self.free = [], []

    def run(self, most=20_000):
        coming, now, active = sorted(self.requests, key=lambda r: r.arrival), 0.0, 0
        for _ in range(most):
            while coming and (coming[0].arrival <= now or not active):
                request = coming.pop(0)
                now = max(now, request.arrival)
                if self.policy.refuses(request):
                    self.refused.append(request)
                else:
                    self.policy.add(request)
                    active += 1
            if not active:
                return self
            active -= self.step(now)
            now += 1e-3
        raise AssertionError("the requests do not end")

    def step(self, now):
        iteration = self.policy.next(now)
        assert iteration.work, "nothing runs, though there are requests"
        self.work.append(iteration.work)
        self.free.append(self.memory.free)
        assert len({r for r, _ in iteration.work}) == len(iteration.work)
        if iteration.packs is not None:
            assert sorted((r.row, n) for p in iteration.packs for r, n in p) == sorted(
                (r.row, n) for r, n in iteration.work
            )
        if self.cycling():
            blocks = [[self.memory.blocks(r.length) for r, _ in pack] for pack in iteration.packs]
            assert all(sum(each) <= self.policy.room or len(each) == 1 for each in blocks)
            assert iteration.swapped >= sum(r.cached + n for r, n in iteration.work)
        ended = 0
        for request, count in iteration.work:
            assert 1 <= count <= request.left
            self.ran[request.row].append(count)
            request.cached += count
            if request.cached == request.length:
                request.generated += 1
                if request.generated == self.new[request.row]:
                    self.policy.finish(request)
                    self.ended.append(request)
                    ended += 1
        self.check(iteration)
        return ended

    def check(self, iteration):
        held = sum(r.blocks for r in self.requests)
        assert held + self.memory.free == self.memory.total and self.memory.free >= 0
        held_by = [r for r, _ in iteration.work if r not in self.ended]
        assert all(r.cached <= r.blocks * self.memory.block_tokens or self.cycling() for r in held_by)
        assert all(r.blocks == 0 for r in self.ended)

    def cycling(self):
        """Return whether groups take turns on the device, so that none of them stays there."""
        return getattr(self.policy, "cycling", False)


ROWS = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 60), st.integers(1, 30), st.integers(0, 10)), min_size=1, max_size=25
).map(lambda rows: [(at, p, new, new + more) for at, p, new, more in rows])


@settings(max_examples=150, deadline=None)
@given(
    rows=ROWS,
    schedule=st.sampled_from(sorted(SERVING)),
    tokens=st.integers(40, 400),
    swap_space=st.sampled_from([0.0, 100.0, float("inf")]),
)
def test_memory_is_never_exceeded_and_every_request_runs_exactly_its_tokens(rows, schedule, tokens, swap_space):
    found = Device(schedule, rows, tokens, swap_space=swap_space).run()
    assert len(found.ended) + len(found.refused) == len(rows)
    assert all(r.generated == found.new[r.row] for r in found.ended)
    assert found.memory.free == found.memory.total and not found.policy.running
    needed = sum(r.prompt + r.generated - 1 for r in found.ended)
    assert sum(map(sum, found.ran)) == needed + found.policy.recomputed
    if schedule != "vllm":
        assert found.policy.recomputed == 0


@pytest.mark.parametrize("schedule", SERVING)
def test_a_long_request_is_not_starved_by_a_stream_of_short_ones(schedule):
    long = (0.05, 2000, 10, 10)
    short = [(i * 4e-3, 10, 20, 20) for i in range(1500)]  # more than the device can serve
    found = Device(schedule, [long, *short], 2400, seqs=4).run()
    assert found.ended.index(found.requests[0]) < 700


def test_vllm_has_the_latest_give_way_and_compute_all_of_their_tokens_anew():
    found = Device("vllm", [(0.0, 20, 40, 40), (0.0, 20, 40, 40)], 96).run()
    assert found.ran[0] == [20] + 39 * [1]
    again = [n for n in found.ran[1] if n > 1]
    assert found.policy.preemptions == len(again) - 1 > 0
    assert again[0] == 20 and again[1] == 20 + found.ran[1].index(again[1])  # the prompt, and what it had drawn
    assert found.policy.recomputed == sum(again[1:]) - len(again[1:])


def test_vllm_runs_prompts_first_and_alone_and_keeps_its_watermark():
    found = Device("vllm", [(i * 2e-3, 10, 20, 20) for i in range(40)], 200, block=1, seqs=40).run()
    assert found.policy.watermark == 2
    kinds = [{n > 1 for _, n in work} for work in found.work]
    assert all(len(kind) == 1 for kind in kinds)
    assert min(free for free, kind in zip(found.free, kinds, strict=True) if kind == {True}) == 2
    assert min(found.free) == 0


def test_orca_reserves_for_the_longest_answer():
    rows = [(0.0, 10, 5, 90)] * 9
    found = Device("orca", rows, 200, block=1).run()
    assert max(map(len, found.work)) == 2 and found.policy.preemptions == 0  # 200 // (10 + 90 - 1)
    assert max(map(len, Device("vllm", rows, 200, block=1).run().work)) > 2


def test_mlfq_lets_the_short_overtake_the_long_and_long_prompts_join_below():
    rows = [(0.0, 10, 400, 400)] * 4 + [(0.02, 10, 3, 3)] * 4
    ended = [r.row for r in Device("mlfq", rows, 4000, seqs=4).run().ended]
    assert sorted(ended[:4]) == [4, 5, 6, 7]
    assert sorted([r.row for r in Device("orca", rows, 4000, seqs=4).run().ended][:4]) == [0, 1, 2, 3]
    policy = Device("mlfq", [], 4000).policy
    short, long = ServedRequest(0, 4, 1, 0.0), ServedRequest(1, 4000, 1, 0.0)
    policy.add(short)
    policy.add(long)
    assert short in policy.levels[1] and long in policy.levels[7]  # 1.006 and 89 ms; quanta of 1, 2, 4 ... ms


def test_mlfq_and_fluid_swap_where_vllm_computes_anew():
    rows = [(0.0, 20, 40, 40)] * 3
    for schedule in ("mlfq", "fluid"):
        found = Device(schedule, rows, 96, swap_space=0.0).run()
        assert found.policy.preemptions > 0
        assert all(sum(ran) == 20 + 39 for ran in found.ran)


def test_fluid_has_no_limit_on_requests_and_splits_prompts():
    found = Device("fluid", [(0.0, 50, 100, 100)] * 40, 100_000, seqs=2, batched=64).run()
    assert max(map(len, found.work)) == 40
    assert max(sum(n for _, n in work if n > 1) for work in found.work) == 64


def test_groups_of_fluid_take_turns_if_they_do_not_fit():
    """Two requests of 40 + 9 tokens on a device of 60: both run in every iteration, each a group, and both move."""
    found = Device("fluid", [(0.0, 40, 9, 9)] * 2, 60, batched=80).run()
    assert [len(work) for work in found.work] == [2] * 9 and found.policy.preemptions == 0
    outcome = serve(Server(COST, 60, 1e-3, 4), "fluid", ServerLimits(9, 80), lengths.fixed(2, 40, 9))
    assert outcome.swapped == 2 * sum(range(40, 49)) and outcome.steps == 9
    assert outcome.seconds == pytest.approx(1e-3 * outcome.swapped)
    hidden = serve(Server(COST, 60, 0.0, 4), "fluid", ServerLimits(9, 80), lengths.fixed(2, 40, 9))
    fits = serve(Server(COST, 600, 0.0, 4), "fluid", ServerLimits(9, 80), lengths.fixed(2, 40, 9))
    assert hidden.seconds == pytest.approx(fits.seconds) and fits.swapped == 0


def test_packs_as_the_paper_makes_them():
    """Times are of cached tokens: the longest has a worker, bubbles are filled by the longest that fits, KV is 4."""
    work = [(ServedRequest(i, 1, 9, 0.0, cached=n), 1) for i, n in enumerate([3, 4, 10, 6, 4, 10, 1])]

    def rows(room):
        packs = packed(work, lambda cached, count: float(cached), lambda each: 1, room)
        return [[[r.row for r, _ in worker] for worker in pack] for pack in packs]

    assert rows(7) == [[[2], [5], [3, 1], [4, 0, 6]]]
    assert rows(4) == [[[2], [5], [3, 1]], [[4], [0, 6]]]
    assert rows(1) == [[[i]] for i in (2, 5, 3, 1, 4, 0, 6)]


@given(lengths_=st.lists(st.integers(1, 60), max_size=30), room=st.integers(1, 80))
def test_no_worker_takes_longer_than_the_longest(lengths_, room):
    work = [(ServedRequest(i, 1, 9, 0.0, cached=n), 1) for i, n in enumerate(lengths_)]
    packs = packed(work, lambda cached, count: float(cached), lambda each: each[0].cached, room)
    assert sorted(r.row for pack in packs for worker in pack for r, _ in worker) == list(range(len(work)))
    longest = [max(r.cached for worker in pack for r, _ in worker) for pack in packs]
    assert longest == sorted(longest, reverse=True)
    for pack, most in zip(packs, longest, strict=True):
        assert all(sum(r.cached for r, _ in worker) <= most for worker in pack)
        assert sum(r.cached for worker in pack for r, _ in worker) <= max(room, most)


def test_the_latency_bound_is_the_largest_gap_of_a_request():
    rows = lengths.of([20, 20], [41, 41])
    outcome = serve(Server(COST, 96, 1e-6, 4), "vllm", ServerLimits(9, 64), rows)
    assert outcome.preemptions and outcome.largest_gap[1] > 3 * outcome.largest_gap[0] > 0
    assert outcome.latency_bound == pytest.approx(outcome.largest_gap.mean())
    assert sum(outcome.gaps.counts.values()) == 2 * 40
    one = serve(SERVER, "vllm", ServerLimits(4, 512), lengths.of([10], [1]))
    assert np.isnan(one.latency_bound) and not one.gaps.counts


def test_the_time_of_one_request_is_that_of_its_iterations():
    rows = lengths.Lengths(np.array([100]), np.array([4]), np.array([9]), np.array([5.0]))
    prompt = COST.body_seconds(100) + 1e-8 * 100 * 101 / 2
    decoding = sum(COST.body_seconds(1) + 1e-6 * (100 + i) for i in (1, 2, 3))
    for schedule in SERVING:
        outcome = serve(SERVER, schedule, ServerLimits(4, 512), rows)
        assert outcome.latency[0] == pytest.approx(prompt + decoding + 4 * COST.logits_seconds(1))
        assert (outcome.tokens, outcome.rows, outcome.refused, outcome.steps) == (4, 1, 0, 4)
        assert outcome.peak_load == 103
        assert outcome.largest_gap[0] == pytest.approx(COST.body_seconds(1) + 1e-6 * 103 + COST.logits_seconds(1))


@pytest.mark.parametrize("schedule", SERVING)
def test_rows_that_come_at_random_are_all_served_or_refused(schedule):
    rows = lengths.poisson(lengths.lognormal(200, 60, 60, 200, 1), 100.0, 2)
    small = Server(COST, 300, 1e-5)
    outcome = serve(small, schedule, ServerLimits(16, 256, swap_space=0.0), rows)
    served = np.isfinite(outcome.latency)
    assert served.sum() == outcome.rows == 200 - outcome.refused and outcome.refused > 0
    assert outcome.tokens == rows.new[served].sum() and outcome.peak_load <= 300
    assert (outcome.latency[served] > 0).all() and outcome.seconds > rows.arrival[-1]


def test_what_is_swapped_takes_its_time():
    rows = lengths.fixed(3, 20, 41)
    times = [serve(Server(COST, 96, swap), "fluid", ServerLimits(9, 64), rows) for swap in (0.0, 1.0)]
    assert times[0].swapped == times[1].swapped > 0
    assert times[0].seconds < 1 < times[1].seconds <= times[0].seconds + times[1].swapped


def test_devices_by_their_data_sheets():
    one, four = (of_device(SIZE, device(name)) for name in ("a100", "4xa100"))
    assert one.capacity == int((0.9 * 80e9 - SIZE.weight_bytes) / SIZE.kv_bytes_per_token())
    assert four.capacity == int((0.9 * 320e9 - SIZE.weight_bytes) / SIZE.kv_bytes_per_token())
    attend, expected = (server.cost.attend_seconds_per_cached_token for server in (four, one))
    assert attend == pytest.approx(expected / 4) and four.swap_seconds_per_token == pytest.approx(
        one.swap_seconds_per_token / 4
    )
    reduced = 2 * 32 * 2 * 3 / 4 * 2 * 4096 / 300e9  # a ring, twice a layer
    assert four.cost.body_seconds(1024) == pytest.approx(one.cost.body_seconds(1024) / 4 + 1024 * reduced)
    with pytest.raises(UserError, match="as in 4xa10"):
        of_device(ModelSize.alike(40, 13_000_000_000, 0, 5120, 5120, 5120), device("a10"))
    with pytest.raises(UserError, match="a memory of its own, got epyc-7003"):
        of_device(SIZE, device("epyc-7003"))
    for name in ("0xa100", "4x", "4xb100"):
        with pytest.raises(UserError, match="several as in 4xa100"):
            device(name)
    assert all(
        d.is_host or min(d.link_bytes_per_second, d.host_bytes_per_second, d.memory_bytes) > 0 for d in DEVICES.values()
    )
