"""Jobs by their events: what enters and when is decided by the schedule's own code, what it costs by a cost model.

All layers of a step are alike, so a step is one event, and between the steps in which a sequence starts or ends the
loads only grow by one token a sequence. SimulatedFeed have one sample; prefixes are not shared.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import msgspec
import numpy as np

from hpcdecode.planning.cost import Cost, step_seconds
from hpcdecode.planning.lengths import Lengths
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.admission import Admission
from hpcdecode.schedule.auto import split
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.microbatch import left
from hpcdecode.schedule.placement import Placement

_SAMPLES = 512  # of the load, at most twice as many
_NO_STOPS = Stops()


class SimulatedWorld(msgspec.Struct, frozen=True):
    """One S-rank and its R-ranks. capacity: KV tokens of every R-rank; limits: of every lane."""

    cost: Cost
    capacity: list[int]
    limits: list[LaneLimits]
    block_tokens: int = 1


def lane_limits(
    batch: int, period: int, steps: int, lanes: int, load: int, schedule: str, prefill_tokens: int
) -> list[LaneLimits]:
    """Of lanes that share B = batch and W_lim = load."""
    shares = split(batch, lanes)
    return [LaneLimits(b, period, steps, prefill_tokens, None, 0, schedule, load * b // batch) for b in shares]


class Outcome(msgspec.Struct, frozen=True):
    """Seconds from the first row's arrival; rows, generated tokens; S and R: busy seconds, R on average over ranks.

    peak_load: tokens attended to in a step; load: (seconds, tokens) over time; latency: seconds of every row from its
    arrival to its end, float64 [rows]. On a device that serves: preemptions; recomputed, swapped: tokens whose K and V
    were computed again, or moved between device and host.
    """

    seconds: float
    rows: int
    refused: int
    tokens: int
    steps: int
    s_seconds: float
    r_seconds: float
    peak_load: int
    load: list[tuple[float, int]]
    latency: np.ndarray
    preemptions: int = 0
    recomputed: int = 0
    swapped: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-12)


class LoadHistory:
    """Tokens that steps attend to: the peak, and samples over time, at most 2*_SAMPLES of them."""

    def __init__(self):
        self.peak, self.samples = 0, []
        self._seen, self._every = 0, 1

    def add(self, seconds: float, tokens: int) -> None:
        self.peak = max(self.peak, tokens)
        self._seen += 1
        if self._seen % self._every == 0:
            self.samples.append((seconds, tokens))
            if len(self.samples) == 2 * _SAMPLES:
                self.samples, self._every = self.samples[1::2], 2 * self._every


class SimulatedFeed:
    """Feed of the lanes of a world: rows that have arrived."""

    def __init__(self, lengths: Lengths):
        self.lengths, self.clock, self.refused = lengths, 0.0, 0
        self._at = 0
        self._params = {n: SamplingParams(max_tokens=n, ignore_eos=True) for n in np.unique(lengths.most).tolist()}
        self._next = self._prompt()

    @property
    def next_arrival(self) -> float | None:
        return None if self._next is None else float(self.lengths.arrival[self._at])

    def peek(self) -> Prompt | None:
        return self._next if self._next and self.lengths.arrival[self._at] <= self.clock else None

    def pop(self) -> Prompt:
        prompt, self._at = self._next, self._at + 1
        self._next = self._prompt()
        return prompt

    def refuse(self, prompt: Prompt, reason: str) -> None:
        self.pop()
        self.refused += 1

    def _prompt(self) -> Prompt | None:
        if self._at == len(self.lengths):
            return None
        ids = range(int(self.lengths.prompt[self._at]))  # only how many there are matters
        return Prompt(self._at, "", ids, self._params[int(self.lengths.most[self._at])])


class Work(NamedTuple):
    """Of a lane in a step. pairs: of prompt tokens and what they attend to; reads, rows: tokens and sequences on
    every R-rank."""

    decode: int
    drawn: int
    prefill: int
    pairs: int
    reads: np.ndarray
    rows: np.ndarray
    ended: list[int]  # rows


class SimLane:
    """A lane as the `Scheduler` runs it, without its tokens."""

    def __init__(self, lane: int, feed: SimulatedFeed, placement: Placement, limits: LaneLimits):
        self.admission = Admission(lane, feed, placement, limits, _NO_STOPS)
        self.in_flight: dict[int, SequenceState] = {}  # prefilled or decoding, by row
        self._new, self._placement = feed.lengths.new, placement
        self._slots = list(range(limits.slots))[::-1]
        self._prefilling: deque[SequenceState] = deque()
        self._left = 0  # tokens of these to prefill
        self._starts: list[tuple[int, int]] = []  # heaps of (step, row)
        self._ends: list[tuple[int, int]] = []
        self._freed: list[SequenceState] = []
        self._count = np.zeros(len(placement.capacity), np.int64)
        self._reads = np.zeros(len(placement.capacity), np.int64)  # in the last step

    def exhausted(self) -> bool:
        return not (self.in_flight or self._prefilling) and self.admission.exhausted()

    def step(self, now: int) -> Work:
        self._release()
        while self._starts and self._starts[0][0] <= now:
            sequence = self.in_flight[heapq.heappop(self._starts)[1]]
            self._count[sequence.rank] += 1
            self._reads[sequence.rank] += sequence.prompt_length
        if not self._prefilling:
            self._prefilling.extend(self.admission.admit(now, self.in_flight.values(), self._slots).sequences)
            self._left = sum(map(left, self._prefilling))
        self._reads += self._count
        reads, rows, decode = self._reads.copy(), self._count.copy(), int(self._count.sum())
        prefill, pairs, first, ended = self._prefill(now)
        while self._ends and self._ends[0][0] <= now:
            row = heapq.heappop(self._ends)[1]
            sequence = self._end(row, ended)
            self._count[sequence.rank] -= 1
            self._reads[sequence.rank] -= self._length(sequence, now)
        early = sum(self._new[s.prompt.line] < s.max_new for s in self._freed)
        self.admission.policy.saw(decode + first, early)
        return Work(decode, decode + first, prefill, pairs, reads, rows, ended)

    def _prefill(self, now: int) -> tuple[int, int, int, list[int]]:
        """Prompt tokens, pairs of queries and keys, prompts that are complete, rows that end with that."""
        if not self._prefilling:
            return 0, 0, 0, []
        budget = ceil(self._left / max(self._prefilling[0].start_step - now, 1))
        tokens, pairs, complete, ended = budget, 0, 0, []
        while budget and self._prefilling:
            sequence = self._prefilling[0]
            count = min(left(sequence), budget)
            budget -= count
            pairs += count * sequence.prefilled + count * (count + 1) // 2
            sequence.prefilled += count
            if left(sequence):
                break
            self._prefilling.popleft()
            complete += 1
            self._begin(sequence, ended)
        self._left -= tokens - budget
        return tokens - budget, pairs, complete, ended

    def _begin(self, sequence: SequenceState, ended: list[int]) -> None:
        row = sequence.prompt.line
        new = min(int(self._new[row]), sequence.max_new)
        self.in_flight[row] = sequence
        if new == 1:
            self._end(row, ended)
            return
        heapq.heappush(self._starts, (sequence.start_step, row))
        heapq.heappush(self._ends, (sequence.start_step + new - 2, row))

    def _end(self, row: int, ended: list[int]) -> SequenceState:
        sequence = self.in_flight.pop(row)
        self._freed.append(sequence)
        ended.append(row)
        return sequence

    def _release(self) -> None:
        for sequence in self._freed:
            self._placement.remove(sequence)
            self._slots.append(sequence.slot)
        self._freed = []

    @staticmethod
    def _length(sequence: SequenceState, now: int) -> int:
        """Tokens that it attends to at step `now`."""
        return sequence.prompt_length + now - sequence.start_step + 1


def simulate(world: SimulatedWorld, lengths: Lengths) -> Outcome:
    """Run all rows through the lanes of one world."""
    feed, cost = SimulatedFeed(lengths), world.cost
    placement = Placement(world.capacity, world.block_tokens, len(world.limits))
    lanes = [SimLane(i, feed, placement, limits) for i, limits in enumerate(world.limits)]
    latency = np.full(len(lengths), np.nan)
    load, now, tokens = LoadHistory(), 0, 0
    s_seconds = r_seconds = 0.0
    while True:
        if all(lane.exhausted() for lane in lanes):
            if feed.next_arrival is None:
                break
            feed.clock = max(feed.clock, feed.next_arrival)
            continue
        works = [lane.step(now) for lane in lanes]
        turns = [cost.lane(w.decode + w.prefill, w.prefill, w.pairs, w.reads, w.rows) for w in works]
        logits = sum(cost.logits_seconds(w.drawn) for w in works)
        feed.clock += step_seconds(turns, cost.shared) + logits
        now += 1
        s_seconds += sum(t.s for t in turns) + logits
        r_seconds += float(sum(t.r for t in turns).mean())
        tokens += sum(w.drawn for w in works)
        load.add(feed.clock, int(sum(w.reads for w in works).sum()))
        for work in works:
            latency[work.ended] = feed.clock - lengths.arrival[work.ended]
    rows = len(lengths) - feed.refused
    return Outcome(feed.clock, rows, feed.refused, tokens, now, s_seconds, r_seconds, load.peak, load.samples, latency)


def sharded(run: Callable[[Lengths], Outcome], lengths: Lengths, shards: int) -> Outcome:
    """The rows dealt out to so many worlds alike, as by `--shard I/N`; of the loads, that of the first."""
    parts = [run(lengths.part(i, shards)) for i in range(shards)]
    return Outcome(
        seconds=max(p.seconds for p in parts),
        rows=sum(p.rows for p in parts),
        refused=sum(p.refused for p in parts),
        tokens=sum(p.tokens for p in parts),
        steps=max(p.steps for p in parts),
        s_seconds=sum(p.s_seconds for p in parts) / shards,
        r_seconds=sum(p.r_seconds for p in parts) / shards,
        peak_load=max(p.peak_load for p in parts),
        load=parts[0].load,
        latency=np.concatenate([p.latency for p in parts]),
        preemptions=sum(p.preemptions for p in parts),
        recomputed=sum(p.recomputed for p in parts),
        swapped=sum(p.swapped for p in parts),
    )
