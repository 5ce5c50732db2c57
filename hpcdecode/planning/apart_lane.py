"""A simulated lane whose prompts other ranks prefill while it decodes."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdecode.planning.cost import Cost
from hpcdecode.planning.seen_tokens import Beyond, of_chunk, plus
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.planning.simulated_lane import LaneWork, Prefilled, SimulatedLane
from hpcdecode.requests.prefix import remaining
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.apart import PromptsApart
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement


class PrefillRank:
    """A rank that only prefills: a step of prompts after the other, of all lanes that it serves.

    Args:
        cost: Of its slices.

    Attributes:
        free_at: Seconds at which it is done with what it has.
    """

    def __init__(self, cost: Cost):
        self.cost, self.free_at = cost, 0.0

    def run(self, clock: float, tokens: int, pairs: int, completed: int, beyond: Sequence[Beyond]) -> float:
        """Take a step of prompts at `clock`; return when it is done."""
        self.free_at = max(self.free_at, clock) + self.cost.prompt_seconds(tokens, pairs, completed, beyond)
        return self.free_at


class ApartLane(SimulatedLane):
    """A lane as `SimulatedLane`, whose sequences start when a rank that only prefills has done their prompts.

    Args:
        lane: Index of the lane.
        feed: Where rows come from, with the time.
        placement: Where their K and V lie, shared by all lanes.
        limits: Of this lane.
        rank: That prefills.

    Attributes:
        due: Seconds at which its prompts under way are done; None if there are none.
    """

    def __init__(self, lane: int, feed: SimulatedFeed, placement: Placement, limits: LaneLimits, rank: PrefillRank):
        super().__init__(lane, feed, placement, limits, rank.cost.most_seen)
        self.due: float | None = None
        self._feed, self._limits, self._rank = feed, limits, rank
        self._apart = PromptsApart(lane, placement)
        self._sent: list[tuple[SequenceState, int]] = []  # under way: sequences, and tokens of each
        self._done = Prefilled(0, 0, 0, [])  # since the last step

    def step(self, now: int) -> LaneWork:
        """Run lane step `now`, at the feed's time."""
        clock, stalled = self._feed.clock, 0.0
        if self.due is not None and self.due <= clock:
            self._complete(now)
        while self._apart.must_wait(self._prefilling, now):
            self._send(clock)
            stalled = max(stalled, (self.due or clock) - clock)
            self._complete(now)
        work = super().step(now)
        self._send(clock + stalled)
        done, self._done = self._done, Prefilled(0, 0, 0, [])
        none = [Beyond(0, 0)] * len(self._most_seen)
        return work._replace(prompt_tokens=0, pairs=0, pairs_beyond=none, appended=done.tokens, stalled=stalled)

    def _start(self, now: int) -> None:
        """Let sequences decode whose start step has come, and those start later that are not prefilled."""
        self._apart.settle(self._prefilling, (), now, at_once=False)
        super()._start(now)

    def _prefill(self, now: int) -> Prefilled:
        """Return what has been done elsewhere since the last step."""
        return self._done

    def _send(self, clock: float) -> None:
        """Send the next prompts to the rank, if none are under way."""
        if self.due is not None or not self._prefilling:
            return
        budget, pairs, completed = self._limits.prefill_tokens, 0, 0
        beyond = [Beyond(0, 0)] * len(self._most_seen)
        for sequence in self._prefilling:
            assert isinstance(sequence, SequenceState), "prompts that other ranks prefill share nothing here"
            count = min(remaining(sequence), budget)
            if count == 0:
                break
            budget -= count
            pairs += count * sequence.prefilled + count * (count + 1) // 2
            beyond = plus(beyond, of_chunk(self._most_seen, sequence.prefilled, count))
            completed += count == remaining(sequence)
            self._sent.append((sequence, count))
        tokens = self._limits.prefill_tokens - budget
        self.due = self._rank.run(clock, tokens, pairs, completed, beyond)
        self._apart.under_way = True

    def _complete(self, now: int) -> None:
        """Take what the rank has done; what is prefilled starts as the scheduler has it."""
        sent, self._sent, self.due, self._apart.under_way = self._sent, [], None, False
        ended: list[int] = []
        completed = 0
        at_once = self.admission.policy.period == 1 or not self._sequences.any()
        for sequence, count in sent:
            sequence.prefilled += count
            if remaining(sequence):
                continue
            self._prefilling.remove(sequence)
            self._apart.settle((), [sequence], now, at_once)
            if sequence.start_step < now:
                self._placement.start([sequence], now)
            completed += 1
            self._begin(sequence, ended)
        tokens = sum(count for _, count in sent)
        self._done = Prefilled(tokens, 0, completed, ended)
