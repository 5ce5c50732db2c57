"""The layouts that ranks could have, as sums of groups.

| layout | groups | what a group is |
|---|---|---|
| N replicas | N | a rank of both roles: one lane, no wire, capacity C |
| K S + P R, pools own | K | an S-rank and P/K R-ranks, rounded down: capacity C times that |
| K S + P R, pools shared | K | an S-rank and P R-ranks, each with the work of K S-ranks: capacity C*P/K |

With groups of M members each of these has M ranks in the place of one. So K and P are multiples of M, there are 1/M as
many groups, and an R-rank has 1/M of each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpcdecode.planning.cost import Cost
from hpcdecode.planning.group_shape import ONE
from hpcdecode.planning.kv_unit import TOKENS, KvUnit
from hpcdecode.ranks.wishes import POOLS, GroupShape

_STEPS = 16  # numbers of S-ranks that are tried, if there are more ranks than that


class MemberWeights(NamedTuple):
    """Bytes of weights.

    Attributes:
        member: Of a member of a group, the largest one.
        whole: Of the whole model.
    """

    member: float
    whole: float


NONE = MemberWeights(0, 0)


@dataclass(frozen=True)
class GroupsAlike:
    """Groups of a layout that are alike.

    Attributes:
        count: Number of groups.
        cost: Of a group.
        capacity: KV tokens of each rank that holds a KV cache.
        r_ranks: P, over which a member's attention is spread; 0 for ranks of both roles.
        sharing: K, groups on the same R-ranks.
        device: Name of the device of a rank of both roles.
        shape: Members of a group.
        unit: How sequences count against the capacity.
        weights: What members hold of them.
    """

    count: int
    cost: Cost
    capacity: int
    r_ranks: int = 0
    sharing: int = 1
    device: str = ""
    shape: GroupShape = ONE
    unit: KvUnit = TOKENS
    weights: MemberWeights = NONE


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

    @property
    def shape(self) -> GroupShape:
        """Return the shape of its groups."""
        return self.parts[0].shape


@dataclass(frozen=True)
class RanksAlike:
    """Ranks that are alike.

    Attributes:
        name: Of their device; empty if it is not to be shown.
        count: Number of ranks.
        alone: Cost of a group of them with both roles; None if that is impossible.
        capacity: KV tokens of one that holds nothing but a KV cache.
        beside: KV tokens of one beside its weights.
        shape: Members of a group.
        unit: How sequences count against these.
        weights: What one holds of them as a member of a group.
    """

    name: str
    count: int
    alone: Cost | None
    capacity: int
    beside: int
    shape: GroupShape = ONE
    unit: KvUnit = TOKENS
    weights: MemberWeights = NONE

    @property
    def groups(self) -> int:
        """Return how many groups they are enough for."""
        return self.count // self.shape.size


def replicas(s: RanksAlike, r: RanksAlike | None = None) -> PossibleLayout | None:
    """Return the layout in which each of these ranks has both roles, or None if one of them cannot.

    Ranks that are left over from groups have no part in it.

    Args:
        s: Ranks on S devices, or ranks that are alike; none of them for 0.
        r: Ranks on R devices.
    """
    kinds = [kind for kind in (s, r) if kind and kind.count]
    able = [(k, k.alone) for k in kinds if k.alone and k.beside > 0 and k.groups]
    if len(able) < len(kinds):
        return None
    shape = s.shape
    parts = tuple(
        GroupsAlike(k.groups, c, k.beside, device=k.name, shape=k.shape, unit=k.unit, weights=k.weights)
        for k, c in able
    )
    counted = " + ".join(f"{k.groups} {k.name}".rstrip() for k in kinds)
    name = f"{counted} replica{'s' * (sum(k.groups for k in kinds) > 1)}"
    name += f" of {shape.text}" * (shape.size > 1)
    used = [k.groups * shape.size if k else 0 for k in (s, r)]
    return PossibleLayout(name, name, f"--layout replicas {shape.flags}".rstrip(), parts, *used)


def split(
    cost: Cost,
    capacity: int,
    s_ranks: int,
    r_ranks: int,
    pools: str = "shared",
    shape: GroupShape = ONE,
    unit: KvUnit = TOKENS,
    weights: MemberWeights = NONE,
) -> PossibleLayout:
    """Return the layout of so many S-ranks and R-ranks.

    Args:
        cost: Of a group and its R-ranks.
        capacity: KV tokens of an R-rank.
        s_ranks: K, a multiple of the members of a group.
        r_ranks: P, a multiple of the members that have a copy of the model; of own pools at least K.
        pools: Whether each R-rank serves all groups, or one; own pools count as P/K rounded down.
        shape: Members of a group.
        unit: How sequences count against the capacity.
        weights: What S-ranks hold of them.
    """
    groups, each = s_ranks // shape.size, r_ranks // shape.parts
    name, flags = f"{s_ranks} S + {r_ranks} R", f"--layout split --s-ranks {s_ranks}"
    if shape.prefill:
        name = f"{groups} S + {s_ranks - groups} prefill + {r_ranks} R"
        flags = f"--layout split --s-ranks {groups} --prefill-ranks {s_ranks - groups}"
    pool, sharing = (each // groups, 1) if pools == "own" else (each, groups)
    parts = (GroupsAlike(groups, cost, capacity, pool, sharing, shape=shape, unit=unit, weights=weights),)
    members = f", groups of {shape.text}" * (shape.size > 1)
    said = f", pools {pools}" * (groups > 1) + members * (not shape.prefill)
    own, more = " --pools own" * (pools == "own"), "" if shape.prefill else shape.flags
    family = f"split, {pools}" + members
    return PossibleLayout(family, name + said, f"{flags}{own} {more}".rstrip(), parts, s_ranks, r_ranks)


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
        for groups in _numbers(ranks.groups - 1):
            yield from _splits(cost, ranks, ranks, groups, ranks.groups - groups, pools)


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
        for groups in _numbers(s.groups):
            for each in _sizes(r.groups):
                yield from _splits(cost, s, r, groups, each, pools)


def _splits(
    cost: Cost, s: RanksAlike, r: RanksAlike, groups: int, each: int, pools: Sequence[str]
) -> Iterator[PossibleLayout]:
    """Yield the splits of so many groups, with so many R-ranks for `each` member of all groups together."""
    size = r.shape.size
    for kind in pools:
        if kind == "shared" or 1 < groups <= each:
            yield split(cost, r.capacity, groups * size, each * size, kind, r.shape, r.unit, s.weights)


def _numbers(most: int) -> list[int]:
    """Return numbers from 1 to `most`, all of them if they are few."""
    return sorted({max(most * i // _STEPS, 1) for i in range(1, _STEPS + 1)}) if most else []


def _sizes(most: int) -> list[int]:
    """Return numbers from 1 to `most`, each of which is 1.33 to 2 times the one before."""
    powers = [1 << i for i in range(most.bit_length())]
    return [n for n in sorted({*powers, *(3 * power // 2 for power in powers), most}) if 1 <= n <= most]
