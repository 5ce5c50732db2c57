"""What `hpcdecode plan` prints: a setting, with the formula behind every choice."""

from __future__ import annotations

from typing import NamedTuple

from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.planner import ENOUGH, Candidate
from hpcdecode.schedule.auto import FULL


class HourlyPrices(NamedTuple):
    """Prices of an hour; 0 if they are not known.

    Attributes:
        s_rank: Of the S-rank.
        r_rank: Of an R-rank.
    """

    s_rank: float
    r_rank: float


def text(
    plan: Candidate,
    more: Candidate | None,
    single: Candidate | None,
    capacity: int,
    size: ModelSize,
    prices: HourlyPrices,
    profiled: bool,
) -> str:
    """Return the choice with the formulas behind it.

    Args:
        plan: The choice.
        more: With another R-rank, or None if that cannot be said.
        single: The S device alone, or None if nothing fits there.
        capacity: KV tokens of an R-rank.
        size: The model.
        prices: Of an hour.
        profiled: Whether the costs were measured; then nothing is known of the S device alone.
    """
    rows, step, near = plan.rows, plan.step, f"within {1 - ENOUGH:.0%} of the fastest"
    micro_batch, held = plan.batch * rows.period / rows.steps, plan.load / plan.r_ranks / capacity
    balance, room = plan.r_ranks * step.r_rank / max(step.s_rank, 1e-12), FULL * capacity * plan.r_ranks
    lines = [
        f"--batch {plan.batch} --period {rows.period} --lanes {plan.lanes}, {plan.r_ranks} R-ranks: "
        f"{plan.tokens_per_second:,.0f} tokens/s predicted",
        f"F: S/{rows.injections} of S = {rows.steps:,.0f} steps; M = B*F/S = {micro_batch:,.1f} rows a period",
        f"B: the smallest {near}; B*(p + (S+F)/2) = {plan.load:,.0f} tokens <= {FULL}*C*P = {room:,.0f}",
        f"P: the fewest {near}; attention takes as long as the S-part with P = {balance:,.1f}",
        f"latency: S*step = {rows.steps:,.0f} * {step.total * 1e3:,.1f} ms = {plan.latency:,.1f} s to decode a row",
        f"a step: S {step.s_rank * 1e3:,.1f} ms, R {step.r_rank * 1e3:,.1f}, wire {step.wire * 1e3:,.1f}; "
        f"bottleneck: {plan.bottleneck}",
        f"memory: {size.weight_bytes / 1e9:,.1f} GB of weights on S, {held:.0%} of an R-rank's KV",
    ]
    if more:
        lines.append(f"one more R-rank: {more.tokens_per_second / plan.tokens_per_second - 1:+.1%} tokens/s")
    if any(prices):
        price = _price_of_a_million_tokens(plan, prices.s_rank + plan.r_ranks * prices.r_rank)
        lines.append(f"a million tokens: {price:,.2f}")
    if not profiled:
        lines += _comparison(plan, single, prices)
    return "\n".join(lines)


def _comparison(plan: Candidate, single: Candidate | None, prices: HourlyPrices) -> list[str]:
    """Return lines that compare the split with the S device alone."""
    if single is None:
        return ["the S device alone: the model and its KV cache do not fit; the split is what runs"]
    ratio = plan.tokens_per_second / single.tokens_per_second
    said = f"the S device alone, B = {single.batch}: {single.tokens_per_second:,.0f} tokens/s; the split: {ratio:.2f}x"
    if any(prices):
        said += f"; {_price_of_a_million_tokens(single, prices.s_rank):,.2f} a million tokens"
    if ratio > 1:
        return [said]
    return [said, "the split does not pay: run the S device alone, its KV cache in its own memory"]


def _price_of_a_million_tokens(plan: Candidate, price_of_an_hour: float) -> float:
    return price_of_an_hour / 3600 / plan.tokens_per_second * 1e6
