"""B, F, lanes and the number of R-ranks P, by the formulas of the steady state.

Rows have p prompt tokens and decode for S steps, with fixed F. B sequences hold B*(p + (S+F)/2) tokens at the peak
(FastDecode, section 4.2, which has p = 0). They bring B/(S+1) prompts a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from msgspec import structs

from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost, step_seconds
from hpcdecode.schedule.auto import FULL, PERIODS

ENOUGH = 0.97  # of the best speed: fewer R-ranks, or a smaller batch, are taken if they reach it
_INJECTIONS = (PERIODS, PERIODS // 2, PERIODS // 4)  # tried if a job has few rows: it fills sooner
_BATCHES = [n for i in range(3, 15) for n in (1 << i, 3 << (i - 1))]


@dataclass(frozen=True)
class MeanRows:
    """Rows by their means.

    Attributes:
        prompt: p, prompt tokens.
        steps: S, decode steps.
        count: Number of rows; None for so many that start and end do not matter.
        injections: S/F, micro-batches in the life of a row.
    """

    prompt: float
    steps: float
    count: int | None = None
    injections: int = PERIODS

    @property
    def period(self) -> int:
        """Return F."""
        return max(int(self.steps / self.injections), 1)

    @property
    def peak(self) -> float:
        """Return p + (S+F)/2, the tokens of a sequence's share in the peak load (FastDecode, section 4.2)."""
        return self.prompt + (self.steps + self.period) / 2


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step of all lanes.

    Attributes:
        total: Of the step.
        s_rank: Busy seconds of the S-rank.
        r_rank: Busy seconds of an R-rank.
        wire: Busy seconds of the wire.
    """

    total: float
    s_rank: float
    r_rank: float
    wire: float


@dataclass(frozen=True)
class Candidate:
    """A setting, and what it comes to.

    Attributes:
        batch: B, of all lanes.
        lanes: Number of lanes.
        r_ranks: P.
        rows: The workload.
        step: Seconds of a step of the steady state.
        half_step: Seconds of a step with half of the batch.
    """

    batch: int
    lanes: int
    r_ranks: int
    rows: MeanRows
    step: StepSeconds
    half_step: float

    @property
    def tokens_per_second(self) -> float:
        """Return the generated tokens per second.

        Many rows: B/T * (S+1)/S. That is FastDecode's E = B/T(B) with T the whole step; a row's first token comes with
        its prompt. A number of rows adds a start of S-F steps and an end of S steps, at half of the batch on average.
        """
        rows = self.rows
        if rows.count is None:
            return self.batch / self.step.total * (rows.steps + 1) / rows.steps
        full_steps = max(rows.count / self.batch - 1, 0.0) * rows.steps
        half_steps = 2 * rows.steps - rows.period
        return rows.count * (rows.steps + 1) / (full_steps * self.step.total + half_steps * self.half_step)

    @property
    def load(self) -> float:
        """Return B*(p + (S+F)/2), the tokens of the peak load (FastDecode, section 4.2)."""
        return self.batch * self.rows.peak

    @property
    def latency(self) -> float:
        """Return the seconds in which a row decodes: S steps."""
        return self.rows.steps * self.step.total

    @property
    def bottleneck(self) -> str:
        """Return what a step waits for: S, R, wire, or the way of a lane there and back."""
        sides = {"S": self.step.s_rank, "R": self.step.r_rank, "wire": self.step.wire}
        longest = max(sides, key=lambda side: sides[side])
        enough = sides[longest] > 0.9 * self.step.total
        return longest if enough else "the way there and back: more lanes or a larger batch"


def predict(cost: Cost, rows: MeanRows, batch: int, lanes: int, r_ranks: int) -> Candidate:
    """Return the steady state with lanes of one size and R-ranks of one load."""
    half, full = (_step(cost, rows, lane_batch, lanes, r_ranks) for lane_batch in (batch / lanes / 2, batch / lanes))
    return Candidate(batch, lanes, r_ranks, rows, full, half.total)


def _step(cost: Cost, rows: MeanRows, lane_batch: float, lanes: int, r_ranks: int) -> StepSeconds:
    """Return the mean step with `lane_batch` sequences a lane, which bring lane_batch/(S+1) prompts."""
    prompts = lane_batch / (rows.steps + 1)
    prompt_tokens, pairs = prompts * rows.prompt, prompts * rows.prompt * (rows.prompt + 1) / 2
    shares = np.full(r_ranks, 1 / r_ranks)
    tokens, attended, sequences = lane_batch + prompt_tokens, lane_batch * rows.peak * shares, lane_batch * shares
    lane = cost.lane_seconds(tokens, prompt_tokens, pairs, attended, sequences)
    logits = lanes * cost.logits_seconds(lane_batch)
    return StepSeconds(
        total=step_seconds([lane] * lanes, cost.shared_core_fraction) + logits,
        s_rank=lanes * lane.s_rank + logits,
        r_rank=lanes * float(lane.r_ranks.max()),
        wire=lanes * lane.wire,
    )


@dataclass(frozen=True)
class Choice:
    """What to choose from.

    Attributes:
        capacity: KV tokens of an R-rank.
        r_ranks: Numbers of R-ranks, ascending.
        lanes: Numbers of lanes.
        latency: Most seconds in which a row may decode; None for any.
    """

    capacity: int
    r_ranks: Sequence[int]
    lanes: Sequence[int] = (2, 3, 4)
    latency: float | None = None


def choice(capacity: int, r_ranks: int, measured: bool, latency: float | None = None) -> Choice:
    """Return what a planner may choose from.

    Args:
        capacity: KV tokens of an R-rank.
        r_ranks: The most R-ranks there can be; 0 for one process.
        measured: Whether the costs are those of exactly so many R-ranks, so that there cannot be fewer.
        latency: Most seconds in which a row may decode; None for any.
    """
    if not measured:
        return Choice(capacity, range(1, r_ranks + 1), latency=latency)
    return Choice(capacity, (max(r_ranks, 1),), (1, 2, 3, 4) if r_ranks else (1,), latency)


def choose(cost: Cost, rows: MeanRows, choice: Choice) -> Candidate:
    """Return the setting with the fewest R-ranks that reaches ENOUGH of the best speed.

    Raises:
        UserError: If nothing fits.
    """
    fastest = [best for p in choice.r_ranks if (best := _fastest(cost, rows, choice, p))]
    if not fastest:
        most_ranks = max(choice.r_ranks)
        raise UserError(
            f"expected room and time for {_BATCHES[0]} sequences, got none: {most_ranks} R-ranks hold "
            f"{choice.capacity * most_ranks:,} tokens, a sequence takes {rows.peak:,.0f}; raise --kv-memory, "
            "--r-ranks or --latency-limit"
        )
    best_speed = max(plan.tokens_per_second for plan in fastest)
    return next(plan for plan in fastest if plan.tokens_per_second >= ENOUGH * best_speed)


def one_more(cost: Cost, plan: Candidate, choice: Choice) -> Candidate:
    """Return the plan with another R-rank, with the same batch or the best one, whichever is faster."""
    ranks = plan.r_ranks + 1
    same = predict(cost, plan.rows, plan.batch, plan.lanes, ranks)
    return max(same, _fastest(cost, plan.rows, choice, ranks) or same, key=lambda p: p.tokens_per_second)


def alone(cost: Cost, attend_seconds_per_cached_token: float, rows: MeanRows, capacity: int) -> Candidate | None:
    """Return the fastest setting of the S device alone, or None if nothing fits.

    Args:
        cost: Of the split.
        attend_seconds_per_cached_token: Of the S device, with the KV cache in its own memory.
        rows: The workload.
        capacity: KV tokens of that memory.
    """
    local = structs.replace(
        cost,
        attend_seconds_per_cached_token=attend_seconds_per_cached_token,
        attend_seconds_per_sequence=0.0,
        wire_seconds_per_token=0.0,
        message_latency_seconds=0.0,
    )
    plans = [predict(local, rows, b, 1, 1) for b in _BATCHES if b * rows.peak <= FULL * capacity]
    return max(plans, key=lambda p: p.tokens_per_second, default=None)


def _fastest(cost: Cost, rows: MeanRows, choice: Choice, r_ranks: int) -> Candidate | None:
    """Return the smallest batch that reaches ENOUGH of the best speed with `r_ranks` R-ranks, or None."""
    plans = list(_settings(cost, rows, choice, r_ranks))
    if not plans:
        return None
    best_speed = max(plan.tokens_per_second for plan in plans)
    fast = (plan for plan in plans if plan.tokens_per_second >= ENOUGH * best_speed)
    return min(fast, key=lambda p: (p.batch, -p.tokens_per_second))


def _settings(cost: Cost, rows: MeanRows, choice: Choice, r_ranks: int) -> Iterator[Candidate]:
    """Yield the settings whose peak load fits, and whose latency is within the limit."""
    periods = [replace(rows, injections=n) for n in (_INJECTIONS if rows.count else (PERIODS,))]
    for own, batch, lanes in product(periods, _BATCHES, choice.lanes):
        if batch * own.peak <= FULL * choice.capacity * r_ranks:
            plan = predict(cost, own, batch, lanes, r_ranks)
            if choice.latency is None or plan.latency <= choice.latency:
                yield plan
