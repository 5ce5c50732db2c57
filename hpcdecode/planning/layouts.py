"""The layouts that ranks could have, as sums of groups.

| layout | groups | what a group is |
|---|---|---|
| N replicas | N | a rank of both roles: one lane, no wire, capacity C |
| K S + P R, pools own | K | an S-rank and P/K R-ranks, rounded down: capacity C times that |
| K S + P R, pools shared | K | an S-rank and P R-ranks, each with the work of K S-ranks: capacity C*P/K |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpcdecode.planning.cost import Cost
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
        pools: Whether each R-rank serves all S-ranks, or one; own pools count as P/K rounded down.
    """
    name, flags = f"{s_ranks} S + {r_ranks} R", f"--layout split --s-ranks {s_ranks}"
    pool, sharing = (r_ranks // s_ranks, 1) if pools == "own" else (r_ranks, s_ranks)
    parts = (GroupsAlike(s_ranks, cost, capacity, pool, sharing),)
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
