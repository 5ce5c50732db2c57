"""A job on machines that are not there: the schedule's own code decides what runs, a cost model what it takes.

All layers of a step are alike, so a step is one event. Rows have one sample. Groups take rows
from one desk when they have need of them: the group that is behind in time steps next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from hpcdecode.planning.apart_lane import ApartLane, PrefillRank
from hpcdecode.planning.cost import Cost, LaneSeconds
from hpcdecode.planning.kv_unit import TOKENS, KvUnit
from hpcdecode.planning.largest_gap import LargestGaps
from hpcdecode.planning.lengths import Lengths
from hpcdecode.planning.outcome import Gaps, LoadHistory, SimulationOutcome
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.planning.simulated_lane import LaneWork, SimulatedLane
from hpcdecode.planning.step_time import group_seconds, r_rank_seconds
from hpcdecode.schedule.auto import LOOKAHEAD, split
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.optimistic import placement_kind
from hpcdecode.schedule.spread import prefix_room, spread_of


class SimulatedGroups(msgspec.Struct, frozen=True):
    """S-ranks with R-ranks, or ranks of both roles; all of them alike.

    Each member of a group has R-ranks of its own, equally many. What is said of an R-rank holds for those with the same
    place in all of these pools: they have the same sequences.

    Attributes:
        cost: What steps cost on them.
        capacity: KV tokens of every R-rank of a pool.
        limits: Of every lane of a group.
        count: Number of groups.
        sharing: Groups on the same R-ranks, which step together and have even shares of the capacity.
        unit: How sequences count against the capacity.
        admission: `reserve` or `optimistic`.
    """

    cost: Cost
    capacity: list[int]
    limits: list[LaneLimits]
    count: int = 1
    sharing: int = 1
    unit: KvUnit = TOKENS
    admission: str = "reserve"


def lane_limits(
    batch: int,
    period: int,
    steps: int,
    lanes: int,
    load: int,
    schedule: str,
    prefill_tokens: int,
    least_period: int | None = None,
    apart: bool = False,
) -> list[LaneLimits]:
    """Return the limits of lanes that share a job's batch and load limit.

    Args:
        batch: B of all lanes.
        period: F.
        steps: S, most decode steps of a row.
        lanes: Number of lanes.
        load: W_lim of all lanes, in tokens.
        schedule: Name of the schedule.
        prefill_tokens: Most prompt tokens of a lane's step.
        least_period: To which F may shrink, as in `LaneLimits`.
        apart: Whether other ranks prefill, as there.
    """
    sizes = period, steps, prefill_tokens, None, 0, schedule
    return [
        LaneLimits(b, *sizes, load * b // batch, least_period=least_period, apart=apart) for b in split(batch, lanes)
    ]


def sharing(limits: Sequence[LaneLimits], rows: Lengths, capacity: Sequence[int]) -> list[LaneLimits]:
    """Return the limits of lanes whose rows share prefixes. On the S-rank these take no memory here."""
    assert rows.shared is not None, "expected rows that share something"
    first = rows.shared[: LOOKAHEAD * len(limits)].tolist()
    spread, room = spread_of([1] * len(first), first[1:]), prefix_room(capacity, len(limits))
    return [replace(own, prefix_tokens=sum(capacity), spread=spread, prefix_room=room) for own in limits]


def simulate(kinds: Sequence[SimulatedGroups], lengths: Lengths) -> SimulationOutcome:
    """Run all rows through the groups of one world."""
    feed, load, gaps = SimulatedFeed(lengths), LoadHistory(), Gaps()
    largest = np.full(len(lengths), np.nan)
    ways = [LargestGaps(largest) for kind in kinds for _ in range(kind.count // kind.sharing)]
    pools = [_Pool(kind, feed) for kind in kinds for _ in range(kind.count // kind.sharing)]
    latency = np.full(len(lengths), np.nan)
    queue, end = [(0.0, i) for i in range(len(pools))], 0.0  # pools by the time at which they step next
    attended, tokens = 0, 0
    while queue:
        feed.clock, i = heapq.heappop(queue)
        pool = pools[i]
        attended -= pool.attended
        if pool.exhausted():
            pool.attended = 0
            if feed.next_arrival is not None:
                heapq.heappush(queue, (max(feed.clock, feed.next_arrival), i))
            continue
        works, seconds = pool.step(feed.clock)
        gaps.add(seconds, sum(w.decode_tokens for w in works))
        ways[i].step(feed.clock + seconds, [decoded for work in works for decoded in work.decoded])
        attended += pool.attended
        load.add(feed.clock, attended)
        end = max(end, feed.clock + seconds)
        heapq.heappush(queue, (feed.clock + seconds, i))
        tokens += sum(w.sampled_tokens for w in works)
        for work in works:
            latency[work.ended] = feed.clock + seconds - lengths.arrival[work.ended]
    rows = len(lengths) - feed.refused
    s_seconds = sum(p.s_seconds for p in pools) / sum(kind.count for kind in kinds)
    r_seconds = sum(p.r_seconds for p in pools) / sum(len(p.kind.capacity) for p in pools)
    busy = max(p.now for p in pools), s_seconds, r_seconds
    preempted = sum(p.preemptions for p in pools), sum(p.recomputed for p in pools)
    return SimulationOutcome(
        end,
        rows,
        feed.refused,
        tokens,
        *busy,
        load.peak,
        load.samples,
        latency,
        *preempted,
        gaps=gaps,
        largest_gap=largest,
    )


class _Pool:
    """Groups on the same R-ranks, which step together; one group if it has R-ranks of its own.

    Attributes:
        kind: The groups.
        now: Steps so far.
        s_seconds: Busy seconds of all S-ranks together, the mean over the members of a group.
        r_seconds: Busy seconds of all R-ranks together, the mean over the members of a group.
        attended: Tokens that the last step attended to.
    """

    def __init__(self, kind: SimulatedGroups, feed: SimulatedFeed):
        self.kind = kind
        self.now = self.attended = 0
        self.s_seconds = self.r_seconds = 0.0
        self._groups: list[list[SimulatedLane]] = []
        for _ in range(kind.sharing):
            shares = [tokens // kind.sharing for tokens in kind.capacity]
            sizes = kind.unit.footprint, len(kind.limits), None, kind.unit.reach
            placement = placement_kind(kind.admission)(shares, *sizes)
            cost, lanes = kind.cost, list(enumerate(kind.limits))
            ranks = [PrefillRank(cost) for _ in range(cost.prefill_ranks)]
            self._groups.append(
                [ApartLane(i, feed, placement, limits, ranks[i % len(ranks)]) for i, limits in lanes]
                if ranks
                else [SimulatedLane(i, feed, placement, limits, cost.most_seen) for i, limits in lanes]
            )

    @property
    def preemptions(self) -> int:
        """Return how often sequences gave up their room."""
        return sum(lane.preemptions for lanes in self._groups for lane in lanes)

    @property
    def recomputed(self) -> int:
        """Return the tokens whose K and V were dropped so."""
        return sum(lane.recomputed for lanes in self._groups for lane in lanes)

    def exhausted(self) -> bool:
        """Return whether nothing is in flight and no row is left that has arrived."""
        return all(lane.exhausted() for lanes in self._groups for lane in lanes)

    def step(self, clock: float) -> tuple[list[LaneWork], float]:
        """Run a step of all lanes that begins at `clock`; return what each of them did, and the seconds."""
        cost = self.kind.cost
        works = [[lane.step(self.now) for lane in lanes] for lanes in self._groups]
        needs = [[_need(cost, work) for work in lanes] for lanes in works]
        logits = [[cost.logits_seconds(work.sampled_tokens) for work in lanes] for lanes in works]
        stages, ways = len(cost.stage_shares), len(cost.stage_shares) * cost.copies
        self.now += 1
        self.s_seconds += (sum(need.s_rank for lanes in needs for need in lanes) + sum(map(sum, logits))) / ways
        self.r_seconds += float(r_rank_seconds(needs).sum()) / stages
        each = [work for lanes in works for work in lanes]
        self.attended = sum(int(work.attention_load.sum()) for work in each)
        seconds = group_seconds(cost, needs, logits) + max(work.stalled for work in each)
        due = [lane.due for lanes in self._groups for lane in lanes if isinstance(lane, ApartLane) and lane.due]
        if due and not any(work.decode_tokens for work in each):  # nothing else until prompts are done
            seconds = max(seconds, min(due) - clock)
        return each, seconds


def _need(cost: Cost, work: LaneWork) -> LaneSeconds:
    tokens = work.decode_tokens + work.prompt_tokens
    attended = work.attention_load, work.sequences, work.beyond, work.pairs_beyond
    lane = cost.lane_seconds(tokens, work.prompt_tokens, work.pairs, *attended)
    if not work.appended:
        return lane
    appended = cost.append_seconds_per_prompt_token * work.appended / len(work.sequences)
    return msgspec.structs.replace(lane, r_ranks=lane.r_ranks + appended)


def sharded(run: Callable[[Lengths], SimulationOutcome], lengths: Lengths, shards: int) -> SimulationOutcome:
    """Return the outcome of worlds alike, each with every `shards`-th row, as by `--shard I/N`.

    Busy seconds are means over the worlds; `load` is that of the first world.
    """
    parts = [run(lengths.part(i, shards)) for i in range(shards)]
    return SimulationOutcome(
        seconds=max(p.seconds for p in parts),
        rows=sum(p.rows for p in parts),
        refused=sum(p.refused for p in parts),
        tokens=sum(p.tokens for p in parts),
        steps=max(p.steps for p in parts),
        s_seconds=sum(p.s_seconds for p in parts) / shards,
        r_seconds=sum(p.r_seconds for p in parts) / shards,
        peak_load=max(p.peak_load for p in parts),
        load=parts[0].load,
        latency=np.concatenate([p.latency for p in parts]),
        preemptions=sum(p.preemptions for p in parts),
        recomputed=sum(p.recomputed for p in parts),
        swapped=sum(p.swapped for p in parts),
        gaps=Gaps.of(p.gaps for p in parts),
        largest_gap=np.concatenate([p.largest_gap for p in parts]),
        swap_in_bytes=sum(p.swap_in_bytes for p in parts),
        swap_out_bytes=sum(p.swap_out_bytes for p in parts),
        swap_wait_seconds=sum(p.swap_wait_seconds for p in parts),
    )
