"""Every layout that ranks could have, and what it is predicted to reach: the sum over its groups.

| layout | groups | what a group is |
|---|---|---|
| N replicas | N | a rank of both roles: one lane, no wire, capacity C |
| K S + P R, pools own | K | an S-rank and P/K R-ranks: capacity C*P/K |
| K S + P R, pools shared | K | an S-rank and P R-ranks, each with the work of K S-ranks: capacity C*P/K |

`planner.predict` is the step of a group, of which all ranks are busy at once. Rows go to the groups by need. So groups
share them in the ratio of their speeds, and the speed of a layout is the sum over its groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.planner import BATCHES, ENOUGH, SPLIT_LANES, Candidate, Choice, MeanRows, fastest
from hpcdecode.ranks.layout import POOLS

_STEPS = 16  # numbers of S-ranks that are tried, if there are more ranks than that


@dataclass(frozen=True)
class GroupsAlike:
    """Groups of a layout that are alike.

    Attributes:
        count: Number of groups.
        cost: Of a group.
        capacity: KV tokens of each rank that holds a KV cache.
        r_ranks: P, over which a group's attention is spread; 0 for a rank of both roles.
        sharing: K, groups on the same R-ranks.
        device: Name of the device of a rank of both roles.
    """

    count: int
    cost: Cost
    capacity: int
    r_ranks: int = 0
    sharing: int = 1
    device: str = ""


@dataclass(frozen=True)
class PossibleLayout:
    """A layout that ranks could have.

    Attributes:
        family: What it is an instance of; of each family the best one is shown.
        name: As shown, such as `2 S + 6 R, pools own`.
        flags: Of `hpcdecode generate`, that ask for it.
        parts: Its groups, by kind.
        s_ranks: S devices that it takes; of ranks that are alike, those that hold weights.
        r_ranks: R devices that it takes; of ranks that are alike, those that hold KV caches alone.
    """

    family: str
    name: str
    flags: str
    parts: tuple[GroupsAlike, ...]
    s_ranks: int
    r_ranks: int

    @property
    def groups(self) -> int:
        """Return the number of groups."""
        return sum(part.count for part in self.parts)


@dataclass(frozen=True)
class PlannedLayout:
    """A layout, and what it comes to.

    Attributes:
        layout: The layout.
        groups: The setting of one group of every part.
    """

    layout: PossibleLayout
    groups: tuple[Candidate, ...]

    @property
    def tokens_per_second(self) -> float:
        """Return the sum over all groups."""
        parts = zip(self.layout.parts, self.groups, strict=True)
        return sum(part.count * group.tokens_per_second for part, group in parts)

    @property
    def batch(self) -> int:
        """Return B of all groups together."""
        return sum(part.count * group.batch for part, group in zip(self.layout.parts, self.groups, strict=True))


@dataclass(frozen=True)
class GroupWishes:
    """What is asked of every group, whatever the layout.

    Attributes:
        latency: Most seconds in which a row may decode; None for any.
        batches: Values of B.
        lanes: Numbers of lanes; None chooses.
    """

    latency: float | None = None
    batches: Sequence[int] = BATCHES
    lanes: Sequence[int] | None = None


ANYTHING = GroupWishes()


@dataclass(frozen=True)
class RanksAlike:
    """Ranks that are alike.

    Attributes:
        name: Of their device; empty if it is not to be shown.
        count: Number of ranks.
        alone: Cost of one with both roles; None if that is impossible.
        capacity: KV tokens of one that holds nothing but a KV cache.
        beside: KV tokens of one beside the weights.
    """

    name: str
    count: int
    alone: Cost | None
    capacity: int
    beside: int


def replicas(s: RanksAlike, r: RanksAlike | None = None) -> PossibleLayout | None:
    """Return the layout in which each of these ranks has both roles, or None if one of them cannot.

    Args:
        s: Ranks on S devices, or ranks that are alike; none of them for 0.
        r: Ranks on R devices.
    """
    kinds = [kind for kind in (s, r) if kind and kind.count]
    parts = tuple(GroupsAlike(k.count, k.alone, k.beside, device=k.name) for k in kinds if k.alone and k.beside > 0)
    if len(parts) < len(kinds):
        return None
    counted = " + ".join(f"{k.count} {k.name}".rstrip() for k in kinds)
    name = f"{counted} replica{'s' * (sum(k.count for k in kinds) > 1)}"
    return PossibleLayout(name, name, "--layout replicas", parts, s.count, r.count if r else 0)


def split(cost: Cost, capacity: int, s_ranks: int, r_ranks: int, pools: str = "shared") -> PossibleLayout:
    """Return the layout of so many S-ranks and R-ranks.

    Args:
        cost: Of an S-rank and its R-ranks.
        capacity: KV tokens of an R-rank.
        s_ranks: K.
        r_ranks: P; of own pools at least K.
        pools: Whether each R-rank serves all S-ranks, or one; P/K that is no whole number makes pools of two sizes.
    """
    name, flags = f"{s_ranks} S + {r_ranks} R", f"--layout split --s-ranks {s_ranks}"
    if pools == "own":
        few, larger = divmod(r_ranks, s_ranks)
        sizes = ((s_ranks - larger, few), (larger, few + 1))
        parts = tuple(GroupsAlike(count, cost, capacity, pool) for count, pool in sizes if count)
    else:
        parts = (GroupsAlike(s_ranks, cost, capacity, r_ranks, s_ranks),)
    said = f", pools {pools}" if s_ranks > 1 else ""
    own = " --pools own" if pools == "own" else ""
    return PossibleLayout(f"split, {pools}", name + said, flags + own, parts, s_ranks, r_ranks)


def layouts_of_like(ranks: RanksAlike, cost: Cost | None, pools: Sequence[str] = POOLS) -> Iterator[PossibleLayout]:
    """Yield the layouts of ranks that are alike: all of them replicas, or K of them S-ranks and the others R-ranks.

    Args:
        ranks: The ranks.
        cost: Of an S-rank and R-ranks on such ranks; None if it is not known.
        pools: Kinds of pools.
    """
    if (found := replicas(ranks)) is not None:
        yield found
    if cost is not None:
        for s_ranks in _numbers(ranks.count - 1):
            yield from _splits(cost, ranks.capacity, s_ranks, ranks.count - s_ranks, pools)


def layouts_of_unlike(
    s: RanksAlike, r: RanksAlike, cost: Cost | None, pools: Sequence[str] = POOLS
) -> Iterator[PossibleLayout]:
    """Yield the layouts of S devices, such as GPUs, and R devices, such as CPU nodes.

    A split takes some or all of both.

    Args:
        s: The S devices.
        r: The R devices; there may be none.
        cost: Of an S-rank on an S device and R-ranks on R devices; None if that is impossible.
        pools: Kinds of pools.
    """
    nobody = replace(s, count=0)
    for kinds in ((s, None), (nobody, r), (s, r))[0 if r.count else 2 :]:
        if (found := replicas(*kinds)) is not None:
            yield found
    if cost is not None:
        for s_ranks in _numbers(s.count):
            for r_ranks in _sizes(r.count):
                yield from _splits(cost, r.capacity, s_ranks, r_ranks, pools)


def planned_layout(layout: PossibleLayout, rows: MeanRows, wishes: GroupWishes = ANYTHING) -> PlannedLayout | None:
    """Return a layout with the best setting of its groups, or None if rows do not fit into one of them.

    A group has the rows that its speed in the steady state gives it; groups that are alike have even shares.
    """
    endless = replace(rows, count=None)
    counts: list[int | None] = [None] * len(layout.parts)
    if rows.count is not None and len(counts) == 1:
        counts = [max(round(rows.count / layout.groups), 1)]
    elif rows.count is not None:
        steady = [_best(part, endless, wishes) for part in layout.parts]
        total = sum(p.count * s.tokens_per_second for p, s in zip(layout.parts, steady, strict=True) if s)
        counts = [max(round(rows.count * s.tokens_per_second / total), 1) if s else None for s in steady]
    groups = [_best(p, replace(rows, count=c), wishes) for p, c in zip(layout.parts, counts, strict=True)]
    found = tuple(group for group in groups if group)
    return PlannedLayout(layout, found) if len(found) == len(groups) else None


def choose_layout(
    layouts: Sequence[PossibleLayout], rows: MeanRows, wishes: GroupWishes = ANYTHING
) -> list[PlannedLayout]:
    """Return the best layout, and after it the best of each other family, fastest first.

    Within ENOUGH of the best speed the fewest groups win, of these the fewest ranks, and of these the fewest flags.

    Raises:
        UserError: If rows fit into none.
    """
    plans = [found for layout in layouts if (found := planned_layout(layout, rows, wishes))]
    if not plans:
        raise UserError(
            f"expected a layout with room and time for {min(wishes.batches)} sequences of {rows.peak:,.0f} tokens in "
            "every group, got none: raise --kv-memory, --s-ranks, --r-ranks or --latency-limit"
        )
    families: dict[str, list[PlannedLayout]] = {}
    for found in plans:
        families.setdefault(found.layout.family, []).append(found)
    others = sorted(map(_thrifty, families.values()), key=lambda p: -p.tokens_per_second)
    best = _thrifty(others)
    return [best, *(other for other in others if other is not best)]


def one_more(plan: PlannedLayout, rows: MeanRows, wishes: GroupWishes = ANYTHING) -> PlannedLayout | None:
    """Return a split with another R-rank in each pool, or None for replicas."""
    parts = tuple(replace(part, r_ranks=part.r_ranks + 1) for part in plan.layout.parts if part.r_ranks)
    return planned_layout(replace(plan.layout, parts=parts), rows, wishes) if parts else None


def _thrifty(plans: Sequence[PlannedLayout]) -> PlannedLayout:
    """Return the plan with the fewest groups, ranks and flags, in this order, that reaches ENOUGH of the best."""
    best_speed = max(plan.tokens_per_second for plan in plans)
    fast = (plan for plan in plans if plan.tokens_per_second >= ENOUGH * best_speed)

    def spent(plan: PlannedLayout) -> tuple[int, int, int, float]:
        layout = plan.layout
        return layout.groups, layout.s_ranks + layout.r_ranks, layout.flags.count("--"), -plan.tokens_per_second

    return min(fast, key=spent)


def _best(groups: GroupsAlike, rows: MeanRows, wishes: GroupWishes) -> Candidate | None:
    lanes = wishes.lanes or (SPLIT_LANES if groups.r_ranks else (1,))
    sizes = groups.capacity, max(groups.r_ranks, 1), groups.sharing
    return fastest(groups.cost, rows, Choice(*sizes, lanes, wishes.batches, wishes.latency))


def _splits(cost: Cost, capacity: int, s_ranks: int, r_ranks: int, pools: Sequence[str]) -> Iterator[PossibleLayout]:
    for kind in pools:
        if kind == "shared" or 1 < s_ranks <= r_ranks:
            yield split(cost, capacity, s_ranks, r_ranks, kind)


def _numbers(most: int) -> list[int]:
    """Return numbers from 1 to `most`, all of them if they are few."""
    return sorted({max(most * i // _STEPS, 1) for i in range(1, _STEPS + 1)}) if most else []


def _sizes(most: int) -> list[int]:
    """Return numbers from 1 to `most`, each of which is 1.33 to 2 times the one before."""
    powers = [1 << i for i in range(most.bit_length())]
    return [n for n in sorted({*powers, *(3 * power // 2 for power in powers), most}) if 1 <= n <= most]
