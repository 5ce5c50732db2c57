"""What `hpcdecode plan` and jobs with a profile say of layouts: what was chosen, and what others would reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcdecode.planning.layout_planner import PlannedLayout
from hpcdecode.planning.layouts import GroupsAlike
from hpcdecode.planning.planner import Candidate
from hpcdecode.ranks.wishes import GroupShape
from hpcdecode.schedule.auto import FULL

_SHAPES_SHOWN = 3  # besides that of the choice


class HourlyPrices(NamedTuple):
    """Prices of an hour; 0 if they are not known.

    Attributes:
        s_rank: Of an S device.
        r_rank: Of an R device.
    """

    s_rank: float
    r_rank: float


def text(
    plans: Sequence[PlannedLayout],
    more: PlannedLayout | None,
    prices: HourlyPrices,
) -> str:
    """Return the choice, with the formulas behind it, and what the other layouts reach.

    Args:
        plans: The choice, then the best of other kinds.
        more: The choice with another R-rank, or None if that cannot be said.
        prices: Of an hour.
    """
    best, *others = plans
    lines = [f"layout: {best.layout.name}: {best.tokens_per_second:,.0f} tokens/s predicted ({best.layout.flags})"]
    for part, group in zip(best.layout.parts, best.groups, strict=True):
        lines += _group(part, group)
    if more:
        pool = " a pool" * (best.layout.parts[0].sharing < best.layout.groups)
        lines[-1] += f"; one more R-rank{pool}: {more.tokens_per_second / best.tokens_per_second - 1:+.1%}"
    if others:
        lines.append("others: " + "; ".join(_other(plan, best) for plan in _shown(best, others)))
    if any(prices):
        lines.append("a million tokens: " + "; ".join(f"{plan.layout.name} {_price(plan, prices)}" for plan in plans))
    return "\n".join(lines)


def chosen(plans: Sequence[PlannedLayout]) -> str:
    """Return, for a job, what was chosen, and on a line each what the others are predicted to reach."""
    best, *others = plans
    lines = [f"{best.tokens_per_second:,.0f} tokens/s predicted"]
    lines += [
        f"  {plan.layout.name}: {plan.tokens_per_second / best.tokens_per_second:.2f} of that ({plan.layout.flags})"
        for plan in _shown(best, others)
    ]
    return "\n".join(lines)


def _group(part: GroupsAlike, group: Candidate) -> Iterator[str]:
    """Yield the lines of a group: its setting and a step, and what limits it."""
    rows, step = group.rows, group.step
    sums = f" (sums {step.sums * 1e3:,.1f})" * (part.shape.tp > 1)
    busy = f"S {step.s_rank * 1e3:,.1f} ms{sums}, R {step.r_rank * 1e3:,.1f}, wire {step.wire * 1e3:,.1f}"
    busy += f", prefill {step.prefill * 1e3:,.1f}" * part.shape.prefill
    yield (
        f"each {_what(part)}: --batch {group.batch} --period {rows.period} --lanes {group.lanes}, "
        f"F = S/{rows.injections} of S = {rows.steps:,.0f}; a step: {busy}, in all {step.total * 1e3:,.1f}; "
        f"bottleneck: {_bottleneck(part, group)}"
    )
    yield f"  a row decodes in {group.latency:,.1f} s; {_memory(part)}; {_held(part, group)}" + _balance(part, group)


def _shown(best: PlannedLayout, others: Sequence[PlannedLayout]) -> Iterator[PlannedLayout]:
    """Yield the others with groups of the same shape, and the best one of some other shapes, fastest first."""
    seen: set[GroupShape] = set()
    for plan in others:
        shape = plan.layout.shape
        if shape == best.layout.shape:
            yield plan
        elif shape not in seen and len(seen) < _SHAPES_SHOWN:
            seen.add(shape)
            yield plan


def _held(part: GroupsAlike, group: Candidate) -> str:
    """Return what sequences hold at the peak, and what they may."""
    room, unit = FULL * part.capacity * max(part.r_ranks, 1) / part.sharing, part.unit
    if unit.endless:
        return f"states of B = {group.batch:,} sequences <= {FULL}*C = {room / unit.fixed_tokens:,.0f}"
    state = f" + {unit.state_tokens:,} for a state" * (unit.state_tokens > 0)
    held, windows = group.batch * unit.held(group.rows.held), " less what left windows" * bool(unit.footprint.windows)
    shared = f" less {group.rows.shared:,.0f} of p that are shared" * (group.rows.shared >= 1)
    return f"KV of B*(p + (S+F)/2{windows}{shared}{state}) = {held:,.0f} tokens <= {FULL}*C = {room:,.0f}"


def _memory(part: GroupsAlike) -> str:
    """Return what a rank holds of the weights, and what room it has for KV and states."""
    whole = f" of {part.weights.whole / 1e9:,.1f}" * (part.shape.parts > 1)
    kv = part.capacity * part.unit.token_bytes / 1e9
    what = "states" if part.unit.endless else "KV and states" if part.unit.state_tokens else "KV"
    beside = f"for {what}" + " on an R-rank" * (part.r_ranks > 0)
    return f"a rank: {part.weights.member / 1e9:,.1f}{whole} GB of weights, {kv:,.1f} {beside}"


def _what(part: GroupsAlike) -> str:
    if part.shape.prefill:
        return f"{part.shape.text}, with {part.r_ranks} R-ranks" + f" that serve all {part.sharing}" * (
            part.sharing > 1
        )
    members = f" of {part.shape.text}" * (part.shape.size > 1)
    if not part.r_ranks:
        return f"{part.device} replica{members}".strip()
    one = f"group{members} with {part.r_ranks} R-ranks a member" if members else f"S-rank with {part.r_ranks} R-ranks"
    return one + f" that serve all {part.sharing}" * (part.sharing > 1)


def _bottleneck(part: GroupsAlike, group: Candidate) -> str:
    """Return what a step waits for; of a rank of both roles, which does one thing at a time, what takes longer."""
    if part.r_ranks:
        return group.bottleneck
    return "S" if group.step.s_rank > group.step.r_rank else "R"


def _balance(part: GroupsAlike, group: Candidate) -> str:
    """Return with how many R-ranks in all attention would take as long as the S-part."""
    if not part.r_ranks:
        return ""
    pools = part.count / part.sharing * (part.shape.parts if part.shape.prefill else part.shape.size)
    return f"; S and R balance at P = {pools * part.r_ranks * group.step.r_rank / max(group.step.s_rank, 1e-12):,.1f}"


def _other(plan: PlannedLayout, best: PlannedLayout) -> str:
    groups = list(zip(plan.layout.parts, plan.groups, strict=True))
    sizes = " + ".join(f"{part.count}*{group.batch}" for part, group in groups)
    waits = "/".join(dict.fromkeys(_bottleneck(part, group).split(":")[0] for part, group in groups))
    ratio = plan.tokens_per_second / best.tokens_per_second
    return f"{plan.layout.name} {plan.tokens_per_second:,.0f} ({ratio:.2f}; B {sizes}, bottleneck {waits})"


def _price(plan: PlannedLayout, prices: HourlyPrices) -> str:
    hour = plan.layout.s_ranks * prices.s_rank + plan.layout.r_ranks * prices.r_rank
    return f"{hour / 3600 / plan.tokens_per_second * 1e6:,.2f}"
