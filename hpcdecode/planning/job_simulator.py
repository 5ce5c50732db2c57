"""A job step by step on a clock: the schedulers, plans and KV caches of jobs decide, a cost model says what it takes.

A process of both roles runs the steps of its lanes one after the other; else lanes take turns at every layer.
`simulator` takes all layers of a step as one. Here every layer is an event, as what moves between memory and tiers
depends on when attention needs it. Rows have one sample, and share no prefixes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import reduce

import msgspec
import numpy as np

from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.reach import ALL_TOKENS, Reach
from hpcdecode.errors import InvariantViolation
from hpcdecode.exchange.shares import Share
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.lengths import Lengths
from hpcdecode.planning.outcome import Gaps, LoadHistory, SimulationOutcome
from hpcdecode.planning.packed_attention import PackedAttention
from hpcdecode.planning.seen_tokens import Beyond, of_chunk, plus
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.planning.simulated_ranks import SimulatedRank
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.optimistic import placement_kind
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.step import Step
from hpcdecode.schedule.swaps import Swaps

_TOKEN, _STOP = 7, 9


class JobGroup(msgspec.Struct, frozen=True):
    """An S-rank and its R-ranks, or a rank of both roles.

    Attributes:
        cost: What steps cost.
        capacity: KV tokens of each R-rank, tiers included under the schedule `fluid`.
        limits: Of every lane.
        footprint: What a sequence takes of it.
        ranks: Makes the R-ranks; one if the S-rank is this rank, too.
        alone: Whether it is.
        admission: `reserve` or `optimistic`.
        swaps: Makes the room in tiers for whole sequences; None if there are none.
        attention: How threads share the attention of steps with prompts, alone; None if evenly.
        reach: What decode steps read of a sequence.
    """

    cost: Cost
    capacity: list[int]
    limits: list[LaneLimits]
    footprint: Footprint
    ranks: Callable[[], list[SimulatedRank]]
    alone: bool = True
    admission: str = "reserve"
    swaps: Callable[[], Swaps] | None = None
    attention: PackedAttention | None = None
    reach: Reach = ALL_TOKENS


def simulate_job(group: JobGroup, lengths: Lengths) -> SimulationOutcome:
    """Run rows through a group."""
    return _JobRun(group, lengths).run()


class _JobRun:
    """A job under way.

    Attributes:
        clock: Seconds of the S-rank.
    """

    def __init__(self, group: JobGroup, lengths: Lengths):
        self.group, self.lengths, self.cost = group, lengths, group.cost
        self.feed = SimulatedFeed(lengths, stop_token_ids=(_STOP,))
        self.ranks, self.swaps = group.ranks(), group.swaps() if group.swaps else None
        sizes = group.footprint, len(group.limits), None, group.reach
        placement = placement_kind(group.admission)(group.capacity, *sizes)
        self.lanes = [
            Scheduler(lane, self.feed, placement, limits, Stops(), self.swaps)
            for lane, limits in enumerate(group.limits)
        ]
        self.clock = self.s_seconds = self.r_seconds = 0.0
        self.now = self.tokens = self.prompt_tokens = self.waits = 0
        self.prefill_seconds = 0.0
        self.load, self.gaps = LoadHistory(), Gaps()
        self.latency = np.full(len(lengths), np.nan)

    def run(self) -> SimulationOutcome:
        """Run all rows."""
        while not all(lane.exhausted() for lane in self.lanes) or self.feed.next_arrival is not None:
            self._arrive()
            begin, lanes = self.clock, range(len(self.lanes))
            ran = [
                step for turn in ([[i] for i in lanes] if self.group.alone else [lanes]) for step in self._turn(turn)
            ]
            self.now += 1
            if ran:
                self.waits = 0
                self._account(begin, ran)
            else:
                self._wait()
        counts = [sum(getattr(rank, name) for rank in self.ranks) for name in ("bytes_in", "bytes_out")]
        return SimulationOutcome(
            seconds=self.clock,
            rows=len(self.lengths) - self.feed.refused,
            refused=self.feed.refused,
            tokens=self.tokens,
            steps=self.now,
            s_seconds=self.s_seconds,
            r_seconds=self.r_seconds / len(self.ranks),
            peak_load=self.load.peak,
            load=self.load.samples,
            latency=self.latency,
            preemptions=sum(lane.preemptions for lane in self.lanes),
            recomputed=sum(lane.preempted_tokens for lane in self.lanes),
            swapped=self.swaps.moved_tokens if self.swaps else 0,
            gaps=self.gaps,
            swap_in_bytes=counts[0],
            swap_out_bytes=counts[1],
            swap_wait_seconds=sum(rank.movers.waited for rank in self.ranks),
        )

    def _turn(self, lanes: Sequence[int]) -> list[Step]:
        """Run a step of lanes that take turns; return those that run the model."""
        steps = [(i, *both) for i in lanes if (both := self._next(i, self.lanes[i])) is not None]
        if steps:
            self._layers(steps)
        for i, step, _ in steps:
            self._end(self.lanes[i], step)
        return [step for _, step, _ in steps]

    def _arrive(self) -> None:
        """Let rows arrive; wait for the next one if there is nothing to do."""
        arrival = self.feed.next_arrival
        if arrival is not None and not any(lane.active or lane.admission.waiting for lane in self.lanes):
            self.clock = max(self.clock, arrival)
        self.feed.clock = self.clock

    def _next(self, lane: int, scheduler: Scheduler) -> tuple[Step, list[Share]] | None:
        """Plan a lane's step and let R-ranks carry it out; return None if it runs no model."""
        for rank in self.ranks:
            scheduler.tiers.note(rank.take_results(lane))
        if scheduler.exhausted():
            return None
        step = scheduler.next_step(self.now)
        first = self.group.limits[0].slots * lane
        shares = [Share(step.plan, i, first) for i in range(len(self.ranks))]
        for rank, share in zip(self.ranks, shares, strict=True):
            rank.movers.idle(self.clock)
            rank.apply(lane, share)
        return (step, shares) if step.plan.runs_model else None

    def _wait(self) -> None:
        """Let something come back from tiers, or count a step in which all lanes wait for room.

        Raises:
            InvariantViolation: If they have waited for longer than any schedule has them wait.
        """
        returning = [rank for rank in self.ranks if rank.movers.busy]
        if any(lane.tiers.returning for lane in self.lanes) and returning:
            rank = min(returning, key=lambda rank: rank.movers.now)
            rank.movers.wait(threading.Condition())
            self.clock = max(self.clock, rank.movers.now)
            return
        self.waits += 1
        if self.waits > len(self.lanes) * (max(lane.limits.period for lane in self.lanes) + 2):
            raise InvariantViolation("a lane waits only for room that others hold", f"{self.waits} steps, all lanes")

    def _layers(self, running: Sequence[tuple[int, Step, list[Share]]]) -> None:
        """Let all layers of a step of some lanes pass: lanes take turns on the S-rank, R-ranks serve them in order."""
        layers, latency = self.cost.layers, self.cost.message_latency_seconds
        works = [_StepWork.of(self.cost, step, self.group.attention) for _, step, _ in running]
        back = [self.clock] * len(running)
        for layer in range(layers):
            for i, (_, _, shares) in enumerate(running):
                work = works[i]
                if self.group.alone:
                    self._alone(layer, work, shares[0])
                    continue
                self.clock = max(self.clock, back[i]) + work.slice_seconds
                self.s_seconds += work.slice_seconds
                arrived = self.clock + latency + work.wire_seconds / 2
                ends = [
                    self._serve(rank, layer, share, arrived) for rank, share in zip(self.ranks, shares, strict=True)
                ]
                back[i] = max(ends) + latency + work.wire_seconds / 2
                self.clock += work.prompt_seconds
                self.s_seconds += work.prompt_seconds
        self.clock = max(self.clock, *back)
        for work in works:
            self.s_seconds += work.logits_seconds
            self._pass(work.logits_seconds)

    def _alone(self, layer: int, work: _StepWork, share: Share) -> None:
        """Let a layer pass in a process of both roles."""
        (rank,) = self.ranks
        rank.movers.idle(self.clock)
        rank.movers.compute(work.slice_seconds)
        begin = rank.movers.now
        rank.attend(layer, share)
        self.r_seconds += rank.movers.now - begin
        rank.movers.compute(work.prompt_seconds + work.uneven_seconds)
        self.s_seconds += work.slice_seconds + work.prompt_seconds + work.uneven_seconds
        self.clock = rank.movers.now

    def _serve(self, rank: SimulatedRank, layer: int, share: Share, arrived: float) -> float:
        """Let an R-rank attend to what has arrived; return when it is done."""
        rank.movers.idle(arrived)
        begin = rank.movers.now
        rank.attend(layer, share)
        self.r_seconds += rank.movers.now - begin
        return rank.movers.now

    def _pass(self, seconds: float) -> None:
        """Let the S-rank work for so long, beside what moves."""
        if not self.group.alone:
            self.clock += seconds
            return
        self.ranks[0].movers.compute(seconds)
        self.clock = self.ranks[0].movers.now

    def _end(self, scheduler: Scheduler, step: Step) -> None:
        """Give the sequences of a step their tokens."""
        new = self.lengths.new
        tokens = [_STOP if len(s.generated) + 1 == new[s.prompt.line] else _TOKEN for s in step.sampled]
        self.tokens += len(tokens)
        for request in scheduler.update(step, tokens):
            row = request.prompt.line
            self.latency[row] = self.clock - self.lengths.arrival[row]

    def _account(self, begin: float, steps: Sequence[Step]) -> None:
        """Count a step of all lanes, and tell the tiers' rule what prompts have taken, as `SRank` does."""
        seconds, decodes = self.clock - begin, sum(len(step.decode) for step in steps)
        prompts = sum(chunk.count for step in steps for chunk in step.prefill)
        self.gaps.add(seconds, decodes)
        self.load.add(begin, sum(lane.load for lane in self.lanes))
        self.prompt_tokens += prompts
        self.prefill_seconds += seconds * prompts / max(decodes + prompts, 1)
        if self.swaps:
            self.swaps.prefill_seconds = self.prefill_seconds / max(self.prompt_tokens, 1)


class _StepWork(msgspec.Struct, frozen=True):
    """Seconds of a lane's step: of a layer's slice, of its prompts' attention, of its wire; and of the logits.

    Attributes:
        uneven_seconds: That attention of a layer takes longer as threads have no work left at its end.
    """

    slice_seconds: float
    prompt_seconds: float
    wire_seconds: float
    logits_seconds: float
    uneven_seconds: float = 0.0

    @classmethod
    def of(cls, cost: Cost, step: Step, attention: PackedAttention | None) -> _StepWork:
        prompts = sum(chunk.count for chunk in step.prefill)
        tokens = len(step.decode) + prompts
        pairs = sum(c.count * c.sequence.prefilled + c.count * (c.count + 1) // 2 for c in step.prefill)
        parts = (of_chunk(cost.most_seen, c.start, c.count) for c in step.prefill)
        beyond = reduce(plus, parts, [Beyond(0, 0)] * len(cost.most_seen))
        prefill = cost.pair_seconds(pairs, prompts, beyond) + cost.prefill_seconds_per_step * bool(prompts)
        return cls(
            (cost.body_seconds(tokens) + cost.sum_seconds_per_token * tokens) / cost.layers,
            prefill / cost.layers,
            cost.wire_seconds_per_token * tokens / cost.layers,
            cost.logits_seconds(len(step.sampled)),
            _uneven_seconds(cost, step, attention, prefill) / cost.layers if attention and prompts else 0.0,
        )


def _uneven_seconds(cost: Cost, step: Step, attention: PackedAttention, prefill: float) -> float:
    """Return the seconds that the attention of a step takes longer than with all threads busy to its end.

    Args:
        cost: Of the process.
        step: With prompts.
        attention: How threads share it.
        prefill: Seconds of the attention of its prompts.
    """
    lengths = [s.prompt_length + len(s.generated) for s in step.decode]
    chunks = [(c.start, c.count) for c in step.prefill]
    attend = float(cost.attention_seconds(np.array(lengths), 1).sum())
    return (attention.stretch(cost, lengths, chunks) - 1) * (prefill + attend)
