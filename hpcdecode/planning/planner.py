"""B, F, lanes and the number of R-ranks P, by the formulas of the steady state, and what one device alone would do.

With fixed F and rows of p prompt tokens that decode for S steps, B sequences hold B*(p + (S+F)/2) tokens at the peak
(FastDecode, section 4.2), and bring B/(S+1) prompts a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from msgspec import structs

from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost, ModelSize, step_seconds
from hpcdecode.schedule.auto import FULL, PERIODS

_ENOUGH = 0.97  # of the best speed: fewer R-ranks are taken where they reach it
_INJECTIONS = (PERIODS, PERIODS // 2, PERIODS // 4)  # where a job has few rows: it fills sooner
_BATCHES = [n for i in range(3, 15) for n in (1 << i, 3 << (i - 1))]


@dataclass(frozen=True)
class MeanRows:
    """Means. prompt: tokens; steps: S, decode steps; count: of rows, None for many; injections: in the life of one."""

    prompt: float
    steps: float
    count: int | None = None
    injections: int = PERIODS

    @property
    def period(self) -> int:
        return max(int(self.steps / self.injections), 1)

    @property
    def peak(self) -> float:
        """Tokens of a sequence's share in the peak load."""
        return self.prompt + (self.steps + self.period) / 2


@dataclass(frozen=True)
class Candidate:
    """A setting, and the seconds of a step: of all, of the S-rank, of the busiest R-rank, on the wire. half: of a step
    with half of the batch."""

    batch: int
    lanes: int
    r_ranks: int
    rows: MeanRows
    step: float
    s: float
    r: float
    wire: float
    half: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the steady state; of a number of rows with its start, S-F steps, and its end, S steps with half of the
        batch on average."""
        rows = self.rows
        if rows.count is None:
            return self.batch / self.step * (rows.steps + 1) / rows.steps
        full = max(rows.count / self.batch - 1, 0.0) * rows.steps
        return rows.count * (rows.steps + 1) / (full * self.step + (2 * rows.steps - rows.period) * self.half)

    @property
    def load(self) -> float:
        return self.batch * self.rows.peak

    @property
    def latency(self) -> float:
        """Seconds in which a row decodes."""
        return self.rows.steps * self.step

    @property
    def bottleneck(self) -> str:
        sides = {"S": self.s, "R": self.r, "wire": self.wire}
        longest = max(sides, key=sides.get)
        return longest if sides[longest] > 0.9 * self.step else "the way there and back: more lanes or a larger batch"


def predict(cost: Cost, rows: MeanRows, batch: int, lanes: int, r_ranks: int) -> Candidate:
    """The steady state with lanes of one size and R-ranks of one load."""
    half, step = (_step(cost, rows, own, lanes, r_ranks) for own in (batch / lanes / 2, batch / lanes))
    return Candidate(batch, lanes, r_ranks, rows, *step, half[0])


def _step(cost: Cost, rows: MeanRows, own: float, lanes: int, r_ranks: int) -> tuple[float, float, float, float]:
    """Seconds of a step with `own` sequences a lane: of all, of the S-rank, of an R-rank, on the wire."""
    prompts = own / (rows.steps + 1)
    chunk, pairs = prompts * rows.prompt, prompts * rows.prompt * (rows.prompt + 1) / 2
    shares = np.full(r_ranks, 1 / r_ranks)
    turn = cost.lane(own + chunk, chunk, pairs, own * rows.peak * shares, own * shares)
    logits = lanes * cost.logits_seconds(own)
    step = step_seconds([turn] * lanes, cost.shared) + logits
    return step, lanes * turn.s + logits, lanes * float(turn.r.max()), lanes * turn.wire


@dataclass(frozen=True)
class Choice:
    """What to choose from. capacity: KV tokens of an R-rank; latency: most seconds in which a row may decode."""

    capacity: int
    r_ranks: Sequence[int]
    lanes: Sequence[int] = (2, 3, 4)
    latency: float | None = None


def choice(capacity: int, r_ranks: int, measured: bool, latency: float | None = None) -> Choice:
    """measured: whether the costs are those of just so many R-ranks, 0 for one process; else there may be fewer."""
    if not measured:
        return Choice(capacity, range(1, r_ranks + 1), latency=latency)
    return Choice(capacity, (max(r_ranks, 1),), (1, 2, 3, 4) if r_ranks else (1,), latency)


def choose(cost: Cost, rows: MeanRows, choice: Choice) -> Candidate:
    """The fastest setting, with no more R-ranks than it takes. UserError where nothing fits."""
    fastest = [best for p in choice.r_ranks if (best := _fastest(cost, rows, choice, p))]
    if not fastest:
        most = max(choice.r_ranks)
        raise UserError(
            f"expected room and time for {_BATCHES[0]} sequences, got none: {most} R-ranks hold "
            f"{choice.capacity * most:,} tokens, a sequence takes {rows.peak:,.0f}; raise --kv-memory, --r-ranks or "
            "--latency-limit"
        )
    most = max(plan.tokens_per_second for plan in fastest)
    return next(plan for plan in fastest if plan.tokens_per_second >= _ENOUGH * most)


def one_more(cost: Cost, plan: Candidate, choice: Choice) -> Candidate:
    """The same or another batch, whichever is faster, with another R-rank."""
    ranks = plan.r_ranks + 1
    same = predict(cost, plan.rows, plan.batch, plan.lanes, ranks)
    return max(same, _fastest(cost, plan.rows, choice, ranks) or same, key=lambda p: p.tokens_per_second)


def _fastest(cost: Cost, rows: MeanRows, choice: Choice, r_ranks: int) -> Candidate | None:
    """Of those that reach nearly the same speed, the one with the smallest batch."""
    plans = list(_settings(cost, rows, choice, r_ranks))
    if not plans:
        return None
    most = max(plan.tokens_per_second for plan in plans)
    return min(
        (p for p in plans if p.tokens_per_second >= _ENOUGH * most), key=lambda p: (p.batch, -p.tokens_per_second)
    )


def _settings(cost: Cost, rows: MeanRows, choice: Choice, r_ranks: int) -> Iterator[Candidate]:
    periods = [replace(rows, injections=n) for n in (_INJECTIONS if rows.count else (PERIODS,))]
    for own, batch, lanes in product(periods, _BATCHES, choice.lanes):
        if batch * own.peak <= FULL * choice.capacity * r_ranks:
            plan = predict(cost, own, batch, lanes, r_ranks)
            if choice.latency is None or plan.latency <= choice.latency:
                yield plan


def alone(cost: Cost, attend: float, rows: MeanRows, capacity: int) -> Candidate | None:
    """The S device with the KV cache in its own memory, of `capacity` tokens; attend: its seconds a cached token."""
    local = structs.replace(cost, attend=attend, row=0.0, wire=0.0, latency=0.0)
    plans = [predict(local, rows, b, 1, 1) for b in _BATCHES if b * rows.peak <= FULL * capacity]
    return max(plans, key=lambda p: p.tokens_per_second, default=None)


def text(
    plan: Candidate,
    more: Candidate | None,
    single: Candidate | None,
    capacity: int,
    size: ModelSize,
    prices: tuple[float, float],
    profiled: bool,
) -> str:
    """The choice with the formulas behind it. prices: of an hour of the S-rank and of an R-rank; 0 for none."""
    rows, p, near = plan.rows, plan, f"within {1 - _ENOUGH:.0%} of the fastest"
    micro, held = p.batch * rows.period / rows.steps, p.load / p.r_ranks / capacity
    balance, room = p.r_ranks * p.r / max(p.s, 1e-12), FULL * capacity * p.r_ranks
    lines = [
        f"--batch {p.batch} --period {rows.period} --lanes {p.lanes}, {p.r_ranks} R-ranks: "
        f"{p.tokens_per_second:,.0f} tokens/s predicted",
        f"F: S/{rows.injections} of S = {rows.steps:,.0f} steps; M = B*F/S = {micro:,.1f} rows a period",
        f"B: the smallest {near}; B*(p + (S+F)/2) = {p.load:,.0f} tokens <= {FULL}*C*P = {room:,.0f}",
        f"P: the fewest {near}; attention takes as long as the S-part with P = {balance:,.1f}",
        f"latency: S*step = {rows.steps:,.0f} * {p.step * 1e3:,.1f} ms = {p.latency:,.1f} s to decode a row",
        f"a step: S {p.s * 1e3:,.1f} ms, R {p.r * 1e3:,.1f}, wire {p.wire * 1e3:,.1f}; bottleneck: {p.bottleneck}",
        f"memory: {size.weight_bytes / 1e9:,.1f} GB of weights on S, {held:.0%} of an R-rank's KV",
    ]
    if more:
        lines.append(f"one more R-rank: {more.tokens_per_second / p.tokens_per_second - 1:+.1%} tokens/s")
    if any(prices):
        lines.append(f"a million tokens: {_price(p, prices[0] + p.r_ranks * prices[1]):,.2f}")
    return "\n".join([*lines, *([] if profiled else _compared(plan, single, prices))])


def _compared(plan: Candidate, single: Candidate | None, prices: tuple[float, float]) -> list[str]:
    if single is None:
        return ["the S device alone: the model and its KV cache do not fit; the split is what runs"]
    ratio = plan.tokens_per_second / single.tokens_per_second
    said = f"the S device alone, B = {single.batch}: {single.tokens_per_second:,.0f} tokens/s; the split: {ratio:.2f}x"
    if any(prices):
        said += f"; {_price(single, prices[0]):,.2f} a million tokens"
    if ratio > 1:
        return [said]
    return [
        said,
        "the split does not pay: run the S device alone, its KV cache in its own memory",
    ]


def _price(plan: Candidate, hour: float) -> float:
    """Of a million tokens, where an hour costs so much."""
    return hour / 3600 / plan.tokens_per_second * 1e6
