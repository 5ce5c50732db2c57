"""What layouts are predicted to reach, and which is the best.

`planner.predict` is the step of a group. Rows go to the groups by need, so the speed of a layout is the sum over its
groups; a number of rows takes as long as the group that ends last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hpcdecode.planning.layouts import GroupsAlike, PossibleLayout
from hpcdecode.planning.planner import (
    BATCHES,
    ENOUGH,
    INJECTIONS,
    SPLIT_LANES,
    Candidate,
    Choice,
    MeanRows,
    fastest,
    prompts_fit,
)
from hpcdecode.schedule.auto import PERIODS
from hpcdecode.schedule.limits import prefill_limit

LARGER_GROUPS = 1.1  # times the speed of smaller groups, that those of more members must be predicted to reach
_ROUNDS = 4  # in which rows are shared out


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
        """Return the sum over all groups; of a number of rows, all tokens over the longest time of a group."""
        parts = list(zip(self.layout.parts, self.groups, strict=True))
        if self.groups[0].rows.count is None:
            return sum(part.count * group.tokens_per_second for part, group in parts)
        return sum(part.count * group.tokens for part, group in parts) / max(group.seconds for group in self.groups)

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
        injections: Values of S/F; None chooses.
    """

    latency: float | None = None
    batches: Sequence[int] = BATCHES
    lanes: Sequence[int] | None = None
    injections: Sequence[int] | None = None


ANYTHING = GroupWishes()


def planned_layout(layout: PossibleLayout, rows: MeanRows, wishes: GroupWishes = ANYTHING) -> PlannedLayout | None:
    """Return a layout with the best setting of its groups, or None if rows do not fit into one of them.

    Groups that are alike have even shares of the rows. Unlike ones have the same B and F, as jobs give them.
    """
    if len(layout.parts) == 1:
        count = rows.count and max(round(rows.count / layout.groups), 1)
        return _with_rows(layout, rows, [count], wishes)
    plans = list(_unlike(layout, rows, wishes))
    if not plans:
        return None
    best_speed = max(plan.tokens_per_second for plan in plans)
    return next(plan for plan in plans if plan.tokens_per_second >= ENOUGH * best_speed)


def _unlike(layout: PossibleLayout, rows: MeanRows, wishes: GroupWishes) -> Iterator[PlannedLayout]:
    """Yield a layout of unlike replicas with every B, ascending, and every F."""
    for batch, injections in product(wishes.batches, INJECTIONS if rows.count else (PERIODS,)):
        if batch == wishes.batches[0] or prompts_fit(rows, batch, prefill_limit(False)):
            setting = replace(wishes, batches=(batch,), injections=(injections,))
            plan = _shared_out(layout, rows, setting) if rows.count else _with_rows(layout, rows, None, setting)
            if plan is not None:
                yield plan


def _shared_out(layout: PossibleLayout, rows: MeanRows, wishes: GroupWishes) -> PlannedLayout | None:
    """Return a layout whose groups take their last rows at the same time, as rows go by need; slow ones end later.

    None if rows do not fit into one of them.
    """
    assert rows.count is not None, "expected a number of rows"
    plan = _with_rows(layout, replace(rows, count=None), None, wishes)
    weights = [group.tokens_per_second for group in plan.groups] if plan else []
    for _ in range(_ROUNDS if plan else 0):
        total = sum(part.count * weight for part, weight in zip(layout.parts, weights, strict=True))
        shares = [max(round(rows.count * weight / total), 1) for weight in weights]
        plan = _with_rows(layout, rows, shares, wishes)
        if plan is None:
            break
        weights = [share / group.taking_seconds for share, group in zip(shares, plan.groups, strict=True)]
    return plan


def _with_rows(
    layout: PossibleLayout, rows: MeanRows, counts: Sequence[int | None] | None, wishes: GroupWishes
) -> PlannedLayout | None:
    """Return a layout whose groups have so many rows each, or None if rows do not fit into one of them."""
    shares = counts or [None] * len(layout.parts)
    groups = [_best(part, replace(rows, count=share), wishes) for part, share in zip(layout.parts, shares, strict=True)]
    found = tuple(group for group in groups if group)
    return PlannedLayout(layout, found) if len(found) == len(groups) else None


def choose_layout(
    layouts: Sequence[PossibleLayout], rows: MeanRows, wishes: GroupWishes = ANYTHING
) -> list[PlannedLayout]:
    """Return the best layout, and after it the best of each other family, fastest first.

    Groups of more members must be faster by LARGER_GROUPS. Of one size, within ENOUGH of the best speed the fewest
    groups win, of these the fewest ranks, and of these the fewest flags. Nothing is returned if rows fit into none.
    """
    plans = [found for layout in layouts if (found := planned_layout(layout, rows, wishes))]
    if not plans:
        return []
    families: dict[str, list[PlannedLayout]] = {}
    for found in plans:
        families.setdefault(found.layout.family, []).append(found)
    others = sorted(map(_thrifty, families.values()), key=lambda p: -p.tokens_per_second)
    needed = max(plan.tokens_per_second for plan in others) / LARGER_GROUPS
    least = min(plan.layout.shape.size for plan in others if plan.tokens_per_second >= needed)
    best = _thrifty([plan for plan in others if plan.layout.shape.size == least])
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
    lanes = wishes.lanes or _lanes(groups)
    sizes = groups.capacity, max(groups.r_ranks, 1), groups.sharing
    prefill = prefill_limit(groups.r_ranks > 0)
    batches = wishes.batches
    if len(batches) == 1 and rows.count is not None:
        batches = (min(batches[0], rows.count),)
    choice = Choice(*sizes, lanes, batches, prefill, wishes.latency, wishes.injections, groups.unit)
    return fastest(groups.cost, rows, choice)


def _lanes(groups: GroupsAlike) -> Sequence[int]:
    """Return the numbers of lanes to try.

    Copies in rotation have one each at least, and one or more that attend meanwhile. Each stage has one at least, and
    others run while one waits. Stages with R-ranks have two or more: with one they wait for each other longer than
    `step_time` says.
    """
    stages, copies = groups.shape.pp, groups.shape.turns
    if copies > 1:
        return tuple(dict.fromkeys((copies, copies + 1, copies + 2, 2 * copies)))
    if groups.r_ranks:
        return tuple(stages * each for each in (SPLIT_LANES if stages == 1 else SPLIT_LANES[1:]))
    return (1,) if groups.shape.size == 1 else (stages, 2 * stages)
