"""A lane as the `Scheduler` runs it, without its tokens: who enters, who attends to how much, who ends."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcdecode.planning.largest_gap import DecodedSteps
from hpcdecode.planning.seen_tokens import Beyond, of_chunk, plus
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.requests.prefix import Prefix, new_key, remaining
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.admission import Admission
from hpcdecode.schedule.chunks import next_chunks, tokens_first
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.slots import Slots

_NO_STOPS = Stops()


class LaneWork(NamedTuple):
    """What a lane does in a step.

    Attributes:
        decode_tokens: Sequences that decode, a token each.
        sampled_tokens: Tokens that are sampled: of these, and of prompts that are complete.
        prompt_tokens: Tokens of prompts.
        pairs: Queries of prompts times the keys that each attends to.
        attention_load: Tokens that each R-rank attends to, int64 [R-ranks].
        sequences: Sequences that decode on each R-rank, int64 [R-ranks].
        ended: Rows that have their last token.
        appended: Tokens of prompts that ranks which only prefill have sent to the R-ranks.
        stalled: Seconds in which the lane waited for such ranks before it began.
        decoded: Steps of the rows that ended, or gave up their room.
        beyond: What sequences have beyond the tokens that some layers attend to, by kind of these layers.
        pairs_beyond: What tokens of prompts have, as well.
    """

    decode_tokens: int
    sampled_tokens: int
    prompt_tokens: int
    pairs: int
    attention_load: NDArray[np.int64]
    sequences: NDArray[np.int64]
    ended: list[int]
    appended: int = 0
    stalled: float = 0.0
    decoded: tuple[DecodedSteps, ...] = ()
    beyond: Sequence[Beyond] = ()
    pairs_beyond: Sequence[Beyond] = ()


class Prefilled(NamedTuple):
    """What a step does of the prompts: tokens, pairs of queries and keys, prompts completed, rows that end so."""

    tokens: int
    pairs: int
    completed: int
    ended: list[int]
    beyond: Sequence[Beyond] = ()


class SimulatedLane:
    """A lane that admits rows by the code of jobs and counts what they need.

    Between the steps in which sequences start or end, the load only grows by one token a sequence. So a step costs
    a few vectors over the R-ranks, however many sequences decode.

    Args:
        lane: Index of the lane.
        feed: Where rows come from.
        placement: Where their K and V lie, shared by all lanes.
        limits: Of this lane.
        most_seen: Tokens that layers attend to at most that do not attend to all, of each kind of them.

    Attributes:
        in_flight: Prefilled or decoding sequences, by row.
        preemptions: How often a sequence gave up its room.
        recomputed: Tokens whose K and V were dropped so.
    """

    def __init__(
        self,
        lane: int,
        feed: SimulatedFeed,
        placement: Placement,
        limits: LaneLimits,
        most_seen: tuple[int, ...] = (),
    ):
        self._most_seen = most_seen
        self.admission = Admission(lane, feed, placement, limits, _NO_STOPS)
        self.in_flight: dict[int, SequenceState] = {}
        self.preemptions = self.recomputed = 0
        self._new, self._placement = feed.lengths.new, placement
        self._slots = Slots(limits.slots)
        self._prefilling: deque[SequenceState | Prefix] = deque()  # prefixes before the sequences that wait for them
        self._prefix_step = 0  # of the micro-batch that is being prefilled
        self._shrunk = False  # whether that has lost sequences, so that its prompts may be done before it starts
        self._starts: list[tuple[int, int, int]] = []  # heaps of (step, row, key of the sequence)
        self._ends: list[tuple[int, int, int]] = []
        self._freed: list[SequenceState] = []
        self._dropped: list[Prefix] = []
        self._now = 0
        self._prefilled: dict[int, int] = {}  # by row in flight, the step with which its prompt was complete
        self._decoded: list[DecodedSteps] = []
        self._sequences = np.zeros(len(placement.capacity), np.int64)
        self._attention_load = np.zeros(len(placement.capacity), np.int64)  # in the last step

    def exhausted(self) -> bool:
        """Return whether nothing is in flight and no row is left that has arrived."""
        return not (self.in_flight or self._prefilling) and self.admission.exhausted()

    def step(self, now: int) -> LaneWork:
        """Run lane step `now`."""
        self._now = now
        self._preempt(now)
        self._release()
        if self._shrunk and not self._prefilling:
            self._shrunk = False
            self._start_ready(now)
        self._start(now)
        self._placement.grow(self.admission.lane, now)
        if not self._prefilling:
            self._admit(now)
        self._attention_load += self._sequences
        attention_load, sequences = self._attention_load.copy(), self._sequences.copy()
        decode_tokens = int(sequences.sum())
        beyond = [Beyond(*self._placement.beyond(most, self.admission.lane, now)) for most in self._most_seen]
        prefill = self._prefill(now)
        self._end_decoded(now, prefill.ended)
        sampled = decode_tokens + prefill.completed
        early = sum(bool(self._new[s.prompt.line] < s.request.max_new_tokens) for s in self._freed)
        self.admission.policy.observe(sampled, early)
        decoded, self._decoded = tuple(self._decoded), []
        loads = attention_load, sequences
        work = LaneWork(decode_tokens, sampled, prefill.tokens, prefill.pairs, *loads, prefill.ended, decoded=decoded)
        return work._replace(beyond=beyond, pairs_beyond=prefill.beyond)

    def _admit(self, now: int) -> None:
        """Take a micro-batch on."""
        group = self.admission.admit(now, self.in_flight.values(), self._slots)
        self._prefilling.extend((*group.prefixes, *group.sequences))
        self._prefix_step = group.prefix_step
        self._dropped += group.dropped

    def _start(self, now: int) -> None:
        """Let sequences decode whose start step has come."""
        for sequence in self._due(self._starts, now):
            self._sequences[sequence.rank] += 1
            self._attention_load[sequence.rank] += sequence.prompt_length

    def _prefill(self, now: int) -> Prefilled:
        """Prefill an even share of the prompt tokens that are left before the micro-batch starts."""
        ended: list[int] = []
        beyond = [Beyond(0, 0)] * len(self._most_seen)
        if not self._prefilling:
            return Prefilled(0, 0, 0, ended, beyond)
        first = self._prefilling[0]
        end = self._prefix_step if isinstance(first, Prefix) else first.start_step
        tokens, pairs, completed = 0, 0, 0
        for chunk in next_chunks(self._prefilling, ceil(tokens_first(self._prefilling) / max(end - now, 1))):
            tokens += chunk.count
            pairs += chunk.count * chunk.start + chunk.count * (chunk.count + 1) // 2
            beyond = plus(beyond, of_chunk(self._most_seen, chunk.start, chunk.count))
            chunk.sequence.prefilled += chunk.count
            if remaining(chunk.sequence):
                break
            self._prefilling.popleft()
            if isinstance(chunk.sequence, SequenceState):
                completed += 1
                self._begin(chunk.sequence, ended)
        return Prefilled(tokens, pairs, completed, ended, beyond)

    def _begin(self, sequence: SequenceState, ended: list[int]) -> None:
        """Put a prefilled sequence in flight; its first token comes with its prompt, and may be its last."""
        row = sequence.prompt.line
        left = self._tokens(sequence) - sequence.resumed
        self.in_flight[row] = sequence
        self._prefilled[row] = self._now
        if left == 1:
            self._end(sequence, ended)
            return
        heapq.heappush(self._starts, (sequence.start_step, row, sequence.key))
        heapq.heappush(self._ends, (sequence.start_step + left - 2, row, sequence.key))

    def _end_decoded(self, now: int, ended: list[int]) -> None:
        """End the sequences whose last token this step decodes."""
        for sequence in self._due(self._ends, now):
            self._end(sequence, ended)
            self._sequences[sequence.rank] -= 1
            self._attention_load[sequence.rank] -= sequence.prompt_length + now - sequence.start_step + 1

    def _due(self, heap: list[tuple[int, int, int]], now: int) -> Iterator[SequenceState]:
        """Take the entries up to step `now`, and yield those of sequences that did not give up their room since."""
        while heap and heap[0][0] <= now:
            _, row, key = heapq.heappop(heap)
            sequence = self.in_flight.get(row)
            if sequence is not None and sequence.key == key:
                yield sequence

    def _end(self, sequence: SequenceState, ended: list[int]) -> None:
        row, tokens = sequence.prompt.line, self._tokens(sequence)
        del self.in_flight[row]
        self._note_decoded(sequence, tokens - sequence.resumed - 1, ended=True)
        sequence.generated = [0] * tokens
        sequence.finish_reason = "stop" if tokens < sequence.request.max_new_tokens else "length"
        self._placement.ended(sequence)
        if sequence.prefix:
            sequence.prefix.users -= 1
        self._freed.append(sequence)
        ended.append(row)

    def _note_decoded(self, sequence: SequenceState, steps: int, ended: bool) -> None:
        """Note in which steps a sequence that is no longer in flight has decoded."""
        row, start = sequence.prompt.line, sequence.start_step
        self._decoded.append(DecodedSteps(row, self._prefilled.pop(row), start, steps, ended))

    def _tokens(self, sequence: SequenceState) -> int:
        """Return how many tokens a sequence generates."""
        return min(int(self._new[sequence.prompt.line]), sequence.request.max_new_tokens)

    def _preempt(self, now: int) -> None:
        """Let sequences give up their room that must, as the scheduler does with its next plan."""
        leaving, prefilling = self._placement.leaving(self.admission.lane), len(self._prefilling)
        if not leaving:
            return
        for sequence in leaving:
            if self.in_flight.pop(sequence.prompt.line, None) is None:
                self._prefilling.remove(sequence)
                self.recomputed += sequence.prefilled
            else:
                steps = max(now - sequence.start_step, 0)
                self.recomputed += sequence.prompt_length + steps
                sequence.generated = [0] * (sequence.resumed + 1 + steps)
                self._note_decoded(sequence, steps, ended=False)
                if sequence.start_step < now:
                    self._sequences[sequence.rank] -= 1
                    self._attention_load[sequence.rank] -= sequence.prompt_length + steps
            self._slots.give_back(sequence)
            self._placement.remove(sequence)
            if sequence.prefix:
                sequence.prefix.users -= 1
            sequence.give_up_room()
        self.preemptions += len(leaving)
        self.admission.put_back(leaving)
        self._shrunk |= len(self._prefilling) < prefilling

    def _start_ready(self, now: int) -> None:
        """Let sequences begin to decode that waited for others of their micro-batch, as the scheduler does."""
        ready = [s for s in self.in_flight.values() if s.start_step >= now]
        ends = {row: step for step, row, key in self._ends if row in self.in_flight and self.in_flight[row].key == key}
        for sequence in ready:
            row, later = sequence.prompt.line, sequence.start_step - now
            sequence.key = new_key()  # entries under the old one do not count any more
            heapq.heappush(self._starts, (now, row, sequence.key))
            heapq.heappush(self._ends, (ends[row] - later, row, sequence.key))
        self._placement.start(ready, now)

    def _release(self) -> None:
        """Free what ended in the step before, as the scheduler does with its next plan."""
        for sequence in self._freed:
            self._placement.remove(sequence)
            self._slots.give_back(sequence)
        for prefix in self._dropped:
            self._placement.drop(prefix)
            self._slots.give_back(prefix)
        self._freed, self._dropped = [], []
