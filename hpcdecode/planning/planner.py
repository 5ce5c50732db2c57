"""B, F, lanes and the number of R-ranks P of a group, by the formulas of the steady state.

A group is an S-rank and its R-ranks, or a rank of both roles; `layouts` adds groups up. Rows have p prompt tokens and
decode for S steps, with fixed F. B sequences hold B*(p + (S+F)/2) tokens at the peak (FastDecode, section 4.2, which
has p = 0), and B states that do not grow. They bring B/(S+1) prompts a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from msgspec.structs import replace as replace_struct

from hpcdecode.planning.cost import Cost
from hpcdecode.planning.kv_unit import TOKENS, KvUnit
from hpcdecode.planning.step_time import busiest_stage_seconds, group_seconds
from hpcdecode.schedule.auto import FULL, PERIODS
from hpcdecode.schedule.limits import prefill_limit

ENOUGH = 0.97  # of the best speed: fewer R-ranks, or a smaller batch, are taken if they reach it
INJECTIONS = (PERIODS, PERIODS // 2, PERIODS // 4)  # tried if a job has few rows: it fills sooner
SPLIT_LANES = (1, 2, 3, 4)  # of a group with R-ranks of its own; one rank of both roles has nothing to overlap
BATCHES = tuple(n for i in range(3, 15) for n in (1 << i, 3 << (i - 1)))


@dataclass(frozen=True)
class MeanRows:
    """Rows by their means.

    Attributes:
        prompt: p, prompt tokens.
        steps: S, decode steps.
        count: Number of rows; None for so many that start and end do not matter.
        injections: S/F, micro-batches in the life of a row.
        shared: Prompt tokens that a row shares with others, which are prefilled and held once.
    """

    prompt: float
    steps: float
    count: int | None = None
    injections: int = PERIODS
    shared: float = 0.0

    @property
    def period(self) -> int:
        """Return F."""
        return max(int(self.steps / self.injections), 1)

    @property
    def peak(self) -> float:
        """Return p + (S+F)/2, the tokens of a sequence's share in the peak load (FastDecode, section 4.2)."""
        return self.prompt + (self.steps + self.period) / 2

    @property
    def held(self) -> float:
        """Return the tokens that a sequence's own part of the KV cache has at the peak load."""
        return self.peak - self.shared

    @property
    def prefilled(self) -> float:
        """Return the tokens of a prompt that are prefilled."""
        return self.prompt - self.shared

    @property
    def pairs(self) -> float:
        """Return the queries of a prompt that is prefilled, times the keys that each attends to."""
        return (self.prompt * (self.prompt + 1) - self.shared * (self.shared + 1)) / 2


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step of all lanes.

    Attributes:
        total: Of the step.
        s_rank: Busy seconds of the S-rank; of several stages that of the busiest.
        r_rank: Busy seconds of an R-rank.
        wire: Busy seconds of the wire.
        prefill: Busy seconds of a rank that only prefills, if there is one.
        sums: Those of the S-rank that it moves and adds sums.
    """

    total: float
    s_rank: float
    r_rank: float
    wire: float
    sums: float = 0.0
    prefill: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A setting, and what it comes to.

    Attributes:
        batch: B, of all lanes of the group.
        lanes: Number of lanes.
        r_ranks: P; 1 for a rank of both roles.
        groups: K, groups alike that these R-ranks serve.
        rows: The workload.
        step: Seconds of a step of the steady state.
        half_step: Seconds of a step with half of the batch.
    """

    batch: int
    lanes: int
    r_ranks: int
    groups: int
    rows: MeanRows
    step: StepSeconds
    half_step: float

    @property
    def tokens_per_second(self) -> float:
        """Return the generated tokens per second of one group.

        Many rows: B/T * (S+1)/S. That is FastDecode's E = B/T(B) with T the whole step; a row's first token comes with
        its prompt.
        """
        if self.rows.count is None:
            return self.batch / self.step.total * (self.rows.steps + 1) / self.rows.steps
        return self.tokens / self.seconds

    @property
    def tokens(self) -> float:
        """Return the generated tokens of a number of rows."""
        assert self.rows.count is not None, "expected a number of rows"
        return self.rows.count * (self.rows.steps + 1)

    @property
    def taking_seconds(self) -> float:
        """Return the seconds until the last of a number of rows is taken: a start of S-F steps is at half of B."""
        rows = self.rows
        assert rows.count is not None, "expected a number of rows"
        full_steps = max(rows.count / self.batch - 1, 0.0) * rows.steps
        return full_steps * self.step.total + (rows.steps - rows.period) * self.half_step

    @property
    def seconds(self) -> float:
        """Return the seconds of a number of rows: the last ones end in S steps, at half of B."""
        return self.taking_seconds + self.rows.steps * self.half_step

    @property
    def load(self) -> float:
        """Return B*(p + (S+F)/2), the tokens of the group's peak load (FastDecode, section 4.2)."""
        return self.batch * self.rows.peak

    @property
    def latency(self) -> float:
        """Return the seconds in which a row decodes: S steps."""
        return self.rows.steps * self.step.total

    @property
    def bottleneck(self) -> str:
        """Return what a step waits for: S, R, wire, prefill, or the way of a lane there and back."""
        sides = {"S": self.step.s_rank, "R": self.step.r_rank, "wire": self.step.wire, "prefill": self.step.prefill}
        longest = max(sides, key=lambda side: sides[side])
        enough = sides[longest] > 0.9 * self.step.total
        return longest if enough else "the way there and back: more lanes or a larger batch"


def predict(cost: Cost, rows: MeanRows, batch: int, lanes: int, r_ranks: int, groups: int = 1) -> Candidate:
    """Return the steady state of a group, with lanes of one size and R-ranks of one load.

    Args:
        cost: Of the group.
        rows: Its workload.
        batch: B of the group.
        lanes: Of the group.
        r_ranks: P, that its attention is spread over.
        groups: K, groups alike that these R-ranks serve: each of them has K times the work of one group.
    """
    sizes = batch / lanes / 2, batch / lanes
    half, full = (_step(cost, rows, lane_batch, lanes, r_ranks, groups) for lane_batch in sizes)
    return Candidate(batch, lanes, r_ranks, groups, rows, full, half.total)


def _step(cost: Cost, rows: MeanRows, lane_batch: float, lanes: int, r_ranks: int, groups: int) -> StepSeconds:
    """Return the mean step with `lane_batch` sequences a lane, which bring lane_batch/(S+1) prompts."""
    prompts = lane_batch / (rows.steps + 1)
    prompt_tokens, pairs = prompts * rows.prefilled, prompts * rows.pairs
    shares = np.full(r_ranks, 1 / r_ranks)
    attended, sequences, elsewhere = lane_batch * rows.peak * shares, lane_batch * shares, 0.0
    appended = cost.append_seconds_per_prompt_token * prompt_tokens / r_ranks
    if cost.prefill_ranks:
        elsewhere = lanes * _prompts_elsewhere(cost, prompt_tokens, pairs, prompts) / cost.prefill_ranks
        prompt_tokens = pairs = 0.0
    tokens = lane_batch + prompt_tokens
    lane = cost.lane_seconds(tokens, prompt_tokens, pairs, attended, sequences)
    if cost.prefill_ranks:
        lane = replace_struct(lane, r_ranks=lane.r_ranks + appended)
    logits = [cost.logits_seconds(lane_batch)] * lanes
    largest = max(cost.stage_shares)
    return StepSeconds(
        total=max(group_seconds(cost, [[lane] * lanes], [logits], groups), elsewhere),
        s_rank=busiest_stage_seconds(cost, lanes * lane.s_rank, sum(logits)),
        r_rank=largest * groups * lanes * float(lane.r_ranks.max()),
        wire=lanes * (largest * lane.wire + lane.move) / cost.copies,
        sums=largest * lanes * cost.sum_seconds_per_token * tokens / cost.copies,
        prefill=elsewhere,
    )


def _prompts_elsewhere(cost: Cost, tokens: float, pairs: float, prompts: float) -> float:
    """Return the seconds in which a rank that only prefills has the prompts of a lane's step, in whole chunks."""
    share = tokens / prefill_limit(True)
    return share * cost.prompt_seconds(prefill_limit(True), pairs / share, prompts / share) if share else 0.0


@dataclass(frozen=True)
class Choice:
    """What to choose from for a group.

    Attributes:
        capacity: KV tokens of an R-rank.
        r_ranks: P, that the attention is spread over.
        groups: K, groups alike that share the R-ranks and their capacity.
        lanes: Numbers of lanes.
        batches: Values of B, ascending.
        prefill_tokens: Most prompt tokens of a lane's step, which `prompts_fit` holds against it.
        latency: Most seconds in which a row may decode; None for any.
        injections: Values of S/F; None for those that suit the number of rows.
        unit: How sequences count against the capacity.
    """

    capacity: int
    r_ranks: int
    groups: int = 1
    lanes: Sequence[int] = SPLIT_LANES
    batches: Sequence[int] = BATCHES
    prefill_tokens: int = prefill_limit(True)
    latency: float | None = None
    injections: Sequence[int] | None = None
    unit: KvUnit = TOKENS


def fastest(cost: Cost, rows: MeanRows, choice: Choice) -> Candidate | None:
    """Return the smallest batch of a group that reaches ENOUGH of the best speed, or None if nothing fits."""
    plans = list(_settings(cost, rows, choice))
    if not plans:
        return None
    best_speed = max(plan.tokens_per_second for plan in plans)
    fast = (plan for plan in plans if plan.tokens_per_second >= ENOUGH * best_speed)
    return min(fast, key=lambda p: (p.batch, -p.tokens_per_second))


def _settings(cost: Cost, rows: MeanRows, choice: Choice) -> Iterator[Candidate]:
    """Yield the settings whose peak load and prompts fit, and whose latency is within the limit."""
    injections = choice.injections or (INJECTIONS if rows.count else (PERIODS,))
    room, least = FULL * choice.capacity * choice.r_ranks / choice.groups, choice.batches[0]
    for count, batch, lanes in product(injections, choice.batches, choice.lanes):
        own = replace(rows, injections=count)
        enough = prompts_fit(rows, batch / lanes, choice.prefill_tokens) and (rows.count is None or batch <= rows.count)
        if batch * choice.unit.held(own.held) <= room and (enough or batch == least):
            plan = predict(cost, own, batch, lanes, choice.r_ranks, choice.groups)
            if choice.latency is None or plan.latency <= choice.latency:
                yield plan


def prompts_fit(rows: MeanRows, lane_batch: float, prefill_tokens: int) -> bool:
    """Return whether a lane of b sequences can have all of them: it needs b*p/(S+1) prompt tokens in a step."""
    return lane_batch * rows.prefilled / (rows.steps + 1) <= prefill_tokens
