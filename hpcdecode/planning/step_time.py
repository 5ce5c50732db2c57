"""Seconds of a step of groups, from what their lanes need: of one stage, or of several stages or copies in turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from hpcdecode.planning.cost import Cost, LaneSeconds


def group_seconds(
    cost: Cost, groups: Sequence[Sequence[LaneSeconds]], logits: Sequence[Sequence[float]], alike: int = 1
) -> float:
    """Return the seconds of one step of groups on the same R-ranks.

    Args:
        cost: Of each group.
        groups: What every lane needs, by group; at least one lane each.
        logits: Seconds of every lane's logits, by group.
        alike: How often each of these groups is there.
    """
    if cost.copies > 1:
        return max(rotation_seconds(cost, *group) for group in zip(groups, logits, strict=True))
    if len(cost.stage_shares) > 1:
        return pipeline_seconds(cost, groups, logits, alike)
    return step_seconds(groups, cost.shared_core_fraction, alike) + max(map(sum, logits))


def pipeline_seconds(
    cost: Cost, groups: Sequence[Sequence[LaneSeconds]], logits: Sequence[Sequence[float]], alike: int = 1
) -> float:
    """Return the seconds of one step of groups whose lanes go through several stages.

    Stage i has the share f[i] of the layers, and the last one the logits as well. So a step takes the longest of:

    1. the S-rank of a stage: sum of f[i]*s over the lanes of its group, and of logits at the last stage;
    2. the busiest R-rank: sum of f[i]*r over the lanes of all groups;
    3. shared cores: shared_core_fraction * (term 1 + the R-ranks of the stage);
    4. the wire: sum of f[i]*wire + move over the lanes of a group, 1 / R-ranks of f[i]*wire of all at an R-rank;
    5. the longest way of one lane through all stages: s + wire + attention + latency + stages*move + logits.

    Args:
        cost: Of each group.
        groups: What every lane needs of all stages, by group.
        logits: Seconds of every lane's logits, by group.
        alike: How often each of these groups is there.
    """
    shares, shared = cost.stage_shares, cost.shared_core_fraction
    r_ranks = alike * r_rank_seconds(groups)
    attention, wires = float(r_ranks.sum()), [sum(lane.wire for lane in lanes) for lanes in groups]
    terms = [max(shares) * float(r_ranks.max()), max(shares) * alike * sum(wires) / len(r_ranks)]
    for lanes, own in zip(groups, logits, strict=True):
        last = sum(own)
        slices, moves = sum(lane.s_rank for lane in lanes), sum(lane.move for lane in lanes)
        for share, end in zip(shares, (*[0.0] * (len(shares) - 1), last), strict=True):
            busy = share * slices + end
            terms += [busy, shared * (busy + share * attention), share * sum(lane.wire for lane in lanes) + moves]
        terms += [
            _round_trip_seconds(lane, shared / len(shares)) + len(shares) * lane.move + end
            for lane, end in zip(lanes, own, strict=True)
        ]
    return max(terms)


def rotation_seconds(cost: Cost, lanes: Sequence[LaneSeconds], logits: Sequence[float]) -> float:
    """Return the seconds of one step of lanes whose slices K copies of the model run in turn.

    A step takes the longest of:

    1. the S-rank of home: 1/K of the sum of s over all lanes, and all logits;
    2. the busiest R-rank: sum of r over all lanes;
    3. the wire: 1/K of the sum of wire + move at an S-rank, 1 / R-ranks of that of wire at an R-rank;
    4. the longest way of one lane: s + logits + the longer of attention + wire + latency, and of what copies hand on
       meanwhile.

    With t_m, t_a and 2*lambda for a layer of s, of r and of latency, and n lanes alike, this is Lamina's rotation:
    a layer takes max(n*t_m/K, n*t_a, t_m + max(t_a + 2*lambda, migration)).

    Args:
        cost: Of the group.
        lanes: What every lane needs.
        logits: Seconds of every lane's logits.
    """
    wire, moves = sum(lane.wire for lane in lanes), sum(lane.move for lane in lanes)
    attention = r_rank_seconds([lanes])
    migration = cost.layers * cost.move_latency_seconds
    ways = (
        lane.s_rank + end + max(float(lane.r_ranks.max()) + lane.wire + lane.latency, lane.move + migration)
        for lane, end in zip(lanes, logits, strict=True)
    )
    home = busiest_stage_seconds(cost, sum(lane.s_rank for lane in lanes), sum(logits))
    return max(home, float(attention.max()), (wire + moves) / cost.copies, wire / len(attention), *ways)


def busiest_stage_seconds(cost: Cost, slices: float, logits: float) -> float:
    """Return the seconds of the busiest S-rank, of `slices` of all layers and the logits of all lanes.

    With several stages it is that of one of these, with several copies that of home.
    """
    if cost.copies > 1:
        return slices / cost.copies + logits
    *others, last = cost.stage_shares
    return max([share * slices for share in others] + [last * slices + logits])


def step_seconds(groups: Sequence[Sequence[LaneSeconds]], shared_core_fraction: float = 0.0, alike: int = 1) -> float:
    """Return the seconds of one step of groups on the same R-ranks, without their logits.

    The lanes of a group take turns on the same ranks, as the two mini-batches of FastDecode do. Groups take turns on
    R-ranks that they share (`--pools shared`), and step together. So a step takes the longest of:

    1. an S-rank: sum of s over the lanes of its group;
    2. the busiest R-rank i: sum of r[i] over the lanes of all groups;
    3. shared cores: shared_core_fraction * (sum of s + sum of r over all lanes and R-ranks);
    4. the wire: sum of wire over the lanes of a group at its S-rank, 1 / R-ranks of that of all groups at an R-rank;
    5. the longest way of one lane: s + wire + latency + max(max r, shared_core_fraction * sum r).

    Args:
        groups: What every lane needs, by group; at least one lane each.
        shared_core_fraction: As of `Cost`.
        alike: How often each of these groups is there.
    """
    s_ranks = [sum(lane.s_rank for lane in lanes) for lanes in groups]
    wires = [sum(lane.wire for lane in lanes) for lanes in groups]
    r_ranks = alike * r_rank_seconds(groups)
    return max(
        *s_ranks,
        float(r_ranks.max()),
        shared_core_fraction * (alike * sum(s_ranks) + float(r_ranks.sum())),
        *wires,
        alike * sum(wires) / len(r_ranks),
        *(_round_trip_seconds(lane, shared_core_fraction) for lanes in groups for lane in lanes),
    )


def r_rank_seconds(groups: Sequence[Sequence[LaneSeconds]]) -> NDArray[np.float64]:
    """Return the seconds of every R-rank, all lanes of all groups together, [R-ranks]."""
    seconds: NDArray[np.float64] = reduce(add, (lane.r_ranks for lanes in groups for lane in lanes))
    return seconds


def _round_trip_seconds(lane: LaneSeconds, shared_core_fraction: float) -> float:
    """Return term 5 of `step_seconds` for one lane."""
    attend = max(float(lane.r_ranks.max()), shared_core_fraction * float(lane.r_ranks.sum()))
    return lane.s_rank + lane.wire + lane.latency + attend
