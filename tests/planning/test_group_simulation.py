"""Groups of several members: the simulator against a model that runs every event, and the formulas of their costs."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from hpcdecode.attention.footprint import WHOLE
from hpcdecode.planning import lengths
from hpcdecode.planning.data_sheets import of_device_alone, of_devices
from hpcdecode.planning.group_shape import member_bytes, member_unit, stage_shares
from hpcdecode.planning.hardware import LinkSpeed, device
from hpcdecode.planning.layout_planner import GroupWishes, planned_layout
from hpcdecode.planning.layouts import RanksAlike, replicas, split
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.planner import MeanRows
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.planning.simulated_lane import SimulatedLane
from hpcdecode.planning.simulator import SimulatedGroups, lane_limits, simulate
from hpcdecode.ranks.wishes import GroupShape
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.routes import Rotation

SIZE = ModelSize.alike(24, 20_550_000_000, 1_050_000_000, 8192, 1024, 1024, kv_heads=16)
H100, EPYC = device("h100"), device("epyc-9004")
NETWORK = LinkSpeed(1.25e10, 2e-5)
SPLIT, OWN = "split", "replicas"
Event = tuple[str | None, float]  # what is busy meanwhile, if anything, and the seconds
Chain = Sequence[Event]  # one after the other


def cost_of(kind, shape, s=H100):
    if kind == OWN:
        return of_device_alone(SIZE, s, "bfloat16", shape, NETWORK)
    return of_devices(SIZE, s, EPYC, NETWORK.bytes_per_second, NETWORK.latency_seconds, "bfloat16", shape)


def events(cost, work, r_ranks, lane) -> Iterator[list[Chain]]:
    """One lane step; chains of a list are at once, and the last one of them ends it."""
    if cost.copies > 1:
        yield from events_of_copies(cost, work, r_ranks, lane)
        return
    for at_once in events_of_stages(cost, work, r_ranks):
        yield [[event] for event in at_once]


def events_of_copies(cost, work, r_ranks, lane) -> Iterator[list[Chain]]:
    """In every layer a slice; then q, k, v there, attention, o to the next copy, and meanwhile the residual to it."""
    tokens, route = work.decode_tokens + work.prompt_tokens, Rotation(cost.copies, cost.layers)
    part = (cost.body_seconds(tokens) + cost.prefill_seconds_per_pair * work.pairs) / cost.layers
    wire, move = (
        each * tokens / cost.layers for each in (cost.wire_seconds_per_token / 2, cost.move_seconds_per_token)
    )
    attend = cost.attend_seconds_per_cached_token * work.attention_load / cost.layers
    for number in range(cost.layers):
        here, after = (f"S{route.copy(lane, n)}" for n in (number, number + 1))
        yield [[(here, part)]]
        there = [(f"out of {here}", wire / r_ranks), (None, cost.message_latency_seconds)]
        back = [(None, cost.message_latency_seconds), (f"into {after}", wire / r_ranks)]
        ways = [[*there, (f"R{i}", float(attend[i])), *back] for i in range(r_ranks)]
        moved = [[(f"out of {here}", move), (None, cost.move_latency_seconds)]] if here != after else []
        yield [*ways, *moved]
    yield [[("S0", cost.logits_seconds(work.sampled_tokens))]]


def events_of_stages(cost, work, r_ranks) -> Iterator[list[Event]]:
    """In every layer two parts of a slice, each with its sum, and q, k, v there, attention, o back."""
    tokens, layers = work.decode_tokens + work.prompt_tokens, cost.layers
    assert tokens, "expected a lane with work"
    sums, wire = 2 if cost.sum_latency_seconds else 1, cost.wire_seconds_per_token * tokens / layers / 2
    slices = cost.body_seconds(tokens) + cost.prefill_seconds_per_pair * work.pairs
    part = (slices + cost.sum_seconds_per_token * tokens) / layers / sums
    attend = cost.attend_seconds_per_cached_token * work.attention_load / layers
    for stage, share in enumerate(cost.stage_shares):
        s_rank = f"S{stage}"
        for _ in range(round(share * layers)):
            for _ in range(sums):
                yield [(s_rank, part)]
                yield [(None, cost.sum_latency_seconds)]
            if not r_ranks:
                yield [(s_rank, float(attend[0]))]
                continue
            yield [(f"out of {s_rank}", wire)]
            yield [(None, cost.message_latency_seconds)]
            yield [(f"R{stage}.{i}", float(attend[i])) for i in range(r_ranks)]
            yield [(None, cost.message_latency_seconds)]
            yield [(f"into {s_rank}", wire)]
        if len(cost.stage_shares) > 1:
            yield [(f"out of {s_rank}", cost.move_seconds_per_token * tokens)]
            yield [(None, cost.move_latency_seconds)]
    yield [(s_rank, cost.logits_seconds(work.sampled_tokens))]


class Busy:
    """What serves one at a time: an S-rank the lane whose step began first, all else the lane that came first."""

    def __init__(self):
        self.lane, self.waiting = None, []

    def next(self):
        self.lane = heapq.heappop(self.waiting) if self.waiting else None
        return self.lane


def run_events(cost, steps, r_ranks) -> float:
    """Seconds until all lanes have run their steps."""

    def program(lane):
        return ((now, each) for now, work in enumerate(steps[lane]) for each in events(cost, work, r_ranks, lane))

    programs = [program(lane) for lane in range(len(steps))]
    resources, left, ages = defaultdict(Busy), [0] * len(programs), [0] * len(programs)
    ends, counted, end = [(0.0, i, i, None, []) for i in range(len(programs))], count(len(programs)), 0.0

    def serve(name, now):
        if (found := resources[name].next()) is not None:
            _, number, lane, chain = found
            heapq.heappush(ends, (now + chain[0][1], number, lane, name, chain[1:]))

    while ends:
        now, _, lane, name, rest = heapq.heappop(ends)
        end, begun = now, [rest] if rest else []
        if not rest:
            left[lane] -= name is not None
        if not rest and not left[lane]:
            ages[lane], begun = next(programs[lane], (0, []))
            left[lane] += len(begun)
        for chain in begun:
            number, busy = next(counted), chain[0][0]
            wanted, age = busy or f"nothing {number}", ages[lane] if busy and busy[0] == "S" else now
            heapq.heappush(resources[wanted].waiting, ((age, lane), number, lane, chain))
            if resources[wanted].lane is None:
                serve(wanted, now)
        if name is not None:
            serve(name, now)
    return end


def works_of(limits, capacity, rows):
    """What every lane does in each of its steps."""
    feed, placement = SimulatedFeed(rows), Placement(capacity, WHOLE, len(limits))
    lanes = [SimulatedLane(i, feed, placement, own) for i, own in enumerate(limits)]
    steps, now = [[] for _ in lanes], 0
    while not all(lane.exhausted() for lane in lanes):
        for own, lane in zip(steps, lanes, strict=True):
            work = lane.step(now)
            own += [work] if work.decode_tokens + work.prompt_tokens else []
        now += 1
    return steps


def steady_seconds(cost, lanes, batch, r_ranks):
    """Seconds of 16 steps between the first ones and the last ones: simulated, and by events.

    Rows of one length start all at once.
    """
    took, capacity = [], [1 << 22] * max(r_ranks, 1)
    limits = lane_limits(batch, 1, 64, lanes, 1 << 40, "static", 1 << 20)
    for new in (9, 25):
        rows = lengths.fixed(batch, 100, new)
        outcome = simulate([SimulatedGroups(cost, capacity, limits)], rows)
        assert outcome.tokens == batch * new and max(outcome.s_seconds, outcome.r_seconds) <= outcome.seconds
        took.append((outcome.seconds, run_events(cost, works_of(limits, capacity, rows), r_ranks)))
    return tuple(long - short for short, long in zip(*took, strict=True))


@pytest.mark.parametrize(
    ("kind", "shape", "lanes", "batch", "r_ranks"),
    [
        (OWN, (2, 1), 1, 64, 0),
        (OWN, (8, 1), 1, 512, 0),
        (OWN, (4, 1), 2, 256, 0),
        (OWN, (1, 2), 2, 128, 0),
        (OWN, (1, 4), 8, 256, 0),
        (OWN, (2, 4), 8, 512, 0),
        (SPLIT, (4, 1), 1, 128, 2),
        (SPLIT, (2, 1), 3, 256, 4),
        (SPLIT, (4, 1), 4, 256, 2),
        (SPLIT, (1, 2), 4, 256, 4),
        (SPLIT, (2, 2), 4, 256, 4),
        (SPLIT, (2, 2), 6, 1024, 8),
        (SPLIT, (1, 4), 8, 256, 2),
        (SPLIT, (1, 4), 12, 1024, 32),
        (SPLIT, (1, 1, 2), 1, 64, 1),
        (SPLIT, (1, 1, 2), 2, 64, 2),
        (SPLIT, (1, 1, 2), 3, 96, 4),
        (SPLIT, (1, 1, 3), 4, 128, 1),
        (SPLIT, (1, 1, 3), 6, 96, 4),
        (SPLIT, (1, 1, 4), 8, 64, 16),
    ],
)
def test_what_is_simulated_is_what_its_events_take(kind, shape, lanes, batch, r_ranks):
    """Within 1 %, if lanes are enough that something is always busy, or if there is one."""
    found, expected = steady_seconds(cost_of(kind, GroupShape(*shape)), lanes, batch, r_ranks)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "lanes", "batch", "r_ranks"),
    [((2, 1), 2, 256, 1), ((4, 1), 2, 1024, 2), ((1, 2), 4, 1024, 2), ((1, 4), 4, 256, 2)],
)
def test_few_lanes_get_in_each_others_way(shape, lanes, batch, r_ranks):
    """If S-ranks or the wire and the way of a lane take nearly as long, events take up to 1.4 times as long."""
    found, expected = steady_seconds(cost_of(SPLIT, GroupShape(*shape)), lanes, batch, r_ranks)
    assert found < 0.9 * expected and expected < 1.4 * found


@pytest.mark.parametrize(
    ("kind", "shape", "lanes", "batch"),
    [(OWN, (4, 1), 1, 64), (OWN, (1, 4), 4, 128), (SPLIT, (2, 1), 3, 96), (SPLIT, (2, 2), 8, 256)],
)
def test_a_layout_of_groups_reaches_what_is_simulated(kind, shape, lanes, batch):
    """The planner's formulas, over some lives of a batch."""
    shape, steps = GroupShape(*shape), 128
    cost, r_ranks = cost_of(kind, shape), 2 * (kind == SPLIT)
    ranks = RanksAlike("h100", shape.size, cost, 1 << 20, 1 << 20, shape)
    layout = replicas(ranks) if kind == OWN else split(cost, 1 << 20, shape.size, 2 * shape.size, "shared", shape)
    plan = planned_layout(layout, MeanRows(50, steps), GroupWishes(batches=(batch,), lanes=(lanes,)))
    limits = lane_limits(batch, plan.groups[0].rows.period, steps, lanes, 1 << 40, "fixed-f", 512)
    group = SimulatedGroups(cost, [1 << 20] * max(r_ranks, 1), limits)
    short, long = (simulate([group], lengths.fixed(n * batch, 50, steps + 1)) for n in (3, 7))
    speed = (long.tokens - short.tokens) / (long.seconds - short.seconds)
    assert plan.tokens_per_second == pytest.approx(speed, rel=0.08)


def test_a_member_has_its_share():
    """1/K of weights, heads, FLOP and wire; two sums a layer of 2(K-1)/K of a token's bytes, each of two messages."""
    one, four = (cost_of(SPLIT, GroupShape(tp, 1), EPYC) for tp in (1, 4))
    names = ("attend_seconds_per_cached_token", "prefill_seconds_per_pair", "wire_seconds_per_token")
    for name in names:
        assert getattr(four, name) == pytest.approx(getattr(one, name) / 4)
    for tokens in (1, 8192):
        assert four.body_seconds(tokens) == pytest.approx(one.body_seconds(tokens) / 4)
        assert four.logits_seconds(tokens) == pytest.approx(one.logits_seconds(tokens) / 4)
    assert four.sum_seconds_per_token == pytest.approx(2 * 24 * 2 * 3 / 4 * 2 * 8192 / NETWORK.bytes_per_second)
    assert four.sum_latency_seconds == 2 * NETWORK.latency_seconds and one.sum_seconds_per_token == 0
    within, between = (cost_of(SPLIT, GroupShape(tp, 1)).sum_seconds_per_token for tp in (8, 16))
    assert within == pytest.approx(4 * 24 * 7 / 8 * 2 * 8192 / H100.link_bytes_per_second)  # eight of a node
    assert between == pytest.approx(4 * 24 * 15 / 16 * 2 * 8192 / NETWORK.bytes_per_second)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7, 24])
def test_stages_have_all_layers(pp):
    """The last stage has the logits, which weigh as 1.2 layers; it has no more than the others."""
    shares = stage_shares(SIZE, pp)
    assert len(shares) == pp and sum(shares) == pytest.approx(1) and min(shares) > 0
    layers, head = [round(24 * share) for share in shares], SIZE.head_weights / (SIZE.layer_weights / 24)
    assert pp in (1, 24) or max(*layers[:-1], layers[-1] + head) <= 24 / pp + head / pp + 1
    shape = GroupShape(2, pp)
    assert member_bytes(SIZE, shape) == pytest.approx(max(*layers[:-1], layers[-1] + head, 0) * 2 * 20.55e9 / 24 / 2)
    own = SIZE.kv_bytes_per_token() * max(layers) / 24 / 2
    assert member_unit(SIZE, shape, "bfloat16").token_bytes == pytest.approx(own)


def test_what_a_stage_hands_on():
    cost = cost_of(OWN, GroupShape(2, 2), EPYC)
    assert cost.move_seconds_per_token == pytest.approx(2 * (8192 + 8192 / 2) / NETWORK.bytes_per_second)
    assert cost.move_latency_seconds == NETWORK.latency_seconds and cost_of(OWN, GroupShape(2, 1)).stage_shares == (1,)


def test_lanes_that_are_tried():
    """Each stage has one, and two if R-ranks attend for it."""
    rows = MeanRows(50, 128)
    for kind, shape, expected in (
        (OWN, GroupShape(1, 4), {4, 8}),
        (OWN, GroupShape(4, 1), {1, 2}),
        (SPLIT, GroupShape(1, 4), {8, 12, 16}),
        (SPLIT, GroupShape(2, 1), {1, 2, 3, 4}),
    ):
        cost = cost_of(kind, shape)
        ranks = RanksAlike("h100", shape.size, cost, 1 << 20, 1 << 20, shape)
        layout = replicas(ranks) if kind == OWN else split(cost, 1 << 20, shape.size, 2 * shape.size, "shared", shape)
        assert planned_layout(layout, rows).groups[0].lanes in expected
