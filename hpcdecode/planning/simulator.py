"""A job on machines that are not there: the schedule's own code decides what runs, a cost model what it takes.

All layers of a step are alike, so a step is one event. Rows have one sample, and share no prefixes.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from hpcdecode.planning.cost import Cost, r_rank_seconds, step_seconds
from hpcdecode.planning.lengths import Lengths
from hpcdecode.planning.outcome import LoadHistory, Outcome
from hpcdecode.planning.simulated_lane import SimulatedFeed, SimulatedLane
from hpcdecode.schedule.auto import split
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement


class SimulatedWorld(msgspec.Struct, frozen=True):
    """One S-rank and its R-ranks.

    Attributes:
        cost: What steps cost on them.
        capacity: KV tokens of every R-rank.
        limits: Of every lane.
        block_tokens: Tokens of a KV block.
    """

    cost: Cost
    capacity: list[int]
    limits: list[LaneLimits]
    block_tokens: int = 1


def lane_limits(
    batch: int, period: int, steps: int, lanes: int, load: int, schedule: str, prefill_tokens: int
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
    """
    shares = split(batch, lanes)
    return [LaneLimits(b, period, steps, prefill_tokens, None, 0, schedule, load * b // batch) for b in shares]


def simulate(world: SimulatedWorld, lengths: Lengths) -> Outcome:
    """Run all rows through the lanes of one world."""
    feed, cost = SimulatedFeed(lengths), world.cost
    placement = Placement(world.capacity, world.block_tokens, len(world.limits))
    lanes = [SimulatedLane(i, feed, placement, limits) for i, limits in enumerate(world.limits)]
    latency = np.full(len(lengths), np.nan)
    load, now, tokens = LoadHistory(), 0, 0
    s_seconds = r_seconds = 0.0
    while True:
        if all(lane.exhausted() for lane in lanes):
            if feed.next_arrival is None:
                break
            feed.clock = max(feed.clock, feed.next_arrival)
            continue
        works = [lane.step(now) for lane in lanes]
        needs = [
            cost.lane_seconds(
                w.decode_tokens + w.prompt_tokens, w.prompt_tokens, w.pairs, w.attention_load, w.sequences
            )
            for w in works
        ]
        logits = sum(cost.logits_seconds(w.sampled_tokens) for w in works)
        feed.clock += step_seconds(needs, cost.shared_core_fraction) + logits
        now += 1
        s_seconds += sum(lane.s_rank for lane in needs) + logits
        r_seconds += float(r_rank_seconds(needs).mean())
        tokens += sum(w.sampled_tokens for w in works)
        load.add(feed.clock, sum(int(w.attention_load.sum()) for w in works))
        for work in works:
            latency[work.ended] = feed.clock - lengths.arrival[work.ended]
    rows = len(lengths) - feed.refused
    return Outcome(feed.clock, rows, feed.refused, tokens, now, s_seconds, r_seconds, load.peak, load.samples, latency)


def sharded(run: Callable[[Lengths], Outcome], lengths: Lengths, shards: int) -> Outcome:
    """Return the outcome of worlds alike, each with every `shards`-th row, as by `--shard I/N`.

    Busy seconds are means over the worlds; `load` is that of the first world.
    """
    parts = [run(lengths.part(i, shards)) for i in range(shards)]
    return Outcome(
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
    )
