"""A lane's state from step to step: what it admits, prefills, decodes and frees becomes a plan a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil

import numpy as np

from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.admission import Admission, Feed
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.microbatch import left
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.slots import Slots
from hpcdecode.schedule.step import Chunk, Step


class Scheduler:
    """Admits rows to one lane and turns its state into a plan a step."""

    def __init__(self, lane: int, feed: Feed, placement: Placement, limits: LaneLimits, stops: Stops):
        self.lane, self.placement, self.limits, self.stops = lane, placement, limits, stops
        self.admission = Admission(lane, feed, placement, limits, stops)
        self.prefixes = self.admission.prefixes
        self.shared_tokens = 0  # of prompts, not prefilled because they lie in prefixes
        self.requests: dict[int, Request] = {}  # in flight, by line
        self.prefilling: deque[SequenceState | Prefix] = deque()  # others follow them; prefixes come first
        self.ready: list[SequenceState] = []  # prefilled, waiting for their micro-batch to start
        self.decoding: list[SequenceState] = []
        self._freed: list[SequenceState] = []  # finished, to be released by the next plan
        self._dropped: list[Prefix] = []  # the same of prefixes
        self._slots = Slots(limits.slots)
        self.load = 0  # tokens that the sequences of the last plan attend to
        self._prefix_step = 0  # when the prefixes in `prefilling` are complete

    @property
    def active(self) -> int:
        return len(self.decoding) + len(self.ready) + sum(len(s.with_forks) for s in self.prefilling)

    @property
    def tokens_in_flight(self) -> int:
        return sum(s.length for s in (*self.decoding, *self.ready)) + sum(s.prefilled for s in self.prefilling)

    def exhausted(self) -> bool:
        """No sequence in flight and no row left to admit."""
        return not self.active and self.admission.exhausted()

    def all_prefilled(self) -> bool:
        """No prompt token left to compute, of the rows in flight and of those to come."""
        return not self.prefilling and self.admission.exhausted()

    def next_step(self, now: int) -> Step:
        """The plan of lane step `now`; it runs no model if there is nothing to do but to wait for room."""
        release = self._release()
        started = [s for s in self.ready if s.start_step <= now]
        self.decoding += started
        self.ready = [s for s in self.ready if s.start_step > now]
        if not self.prefilling:
            self._inject(now)
        self.load = sum(s.length + 1 for s in self.decoding)
        chunks = self._chunks(now)
        forks, self._slots.forks = self._slots.forks + _begun(chunks), []
        plan = Plan(
            release=release,
            fork=_table(forks, 3),
            decode=_table(((s.rank, s.slot) for s in self.decoding), 2),
            prefill=_table(_places(chunks, len(self.decoding)), 4),
        )
        return Step(plan, list(self.decoding), chunks)

    def stop_plan(self) -> Plan:
        """The lane's last plan: it frees what has finished, for the lanes that go on."""
        self._dropped += self.prefixes.drop_unused()
        self.load = 0
        return Plan(release=self._release(), stop=True)

    def update(self, step: Step, tokens: Sequence[int]) -> list[Request]:
        """Take the sampled token of each sequence in `step.sampled`; return the requests that are finished."""
        for request in {id(s.request): s.request for s in step.sampled if s.beams}.values():
            self._update_beams(request)
        finished = []
        for sequence, token in zip(step.sampled, tokens, strict=True):
            if sequence.beams is None:
                sequence.accept(token, self.stops)
            if sequence.finish_reason is not None:
                finished.append(sequence)
                if sequence.prefix:
                    sequence.prefix.users -= 1
        for chunk in step.prefill:
            chunk.sequence.prefilled += chunk.count
            if chunk.completes:
                self.prefilling.popleft()
                if isinstance(chunk.sequence, SequenceState):
                    self.ready += self._slots.fork_from(chunk.sequence)
        self.admission.policy.saw(len(tokens), sum(s.finish_reason == "stop" for s in finished))
        if not finished:
            return []
        self.decoding = [s for s in self.decoding if s.finish_reason is None]
        self._freed += finished
        lines = dict.fromkeys(s.prompt.line for s in finished)
        return [self.requests.pop(line) for line in lines if self.requests[line].finished]

    def _update_beams(self, request: Request) -> None:
        """Let beams go on as their search says, or end."""
        beams, sequences = request.beams, request.sequences
        if not beams.moves:
            for sequence, hypothesis in zip(sequences, beams.best, strict=True):
                sequence.end_as(hypothesis)
            return
        before = [s.generated for s in sequences]
        for sequence, move in zip(sequences, beams.moves, strict=True):
            sequence.generated = [*before[move.parent], move.token]
        if before[0]:  # else the prompt's slot is forked once it is prefilled
            self._slots.follow(request, [move.parent for move in beams.moves])

    def _release(self) -> np.ndarray:
        freed, self._freed = self._freed, []
        dropped, self._dropped = self._dropped, []
        for sequence in freed:
            self.placement.remove(sequence)
        for prefix in dropped:
            self.placement.drop(prefix)
        opened = [s for s in freed if s.slot >= 0]
        places = [(s.rank, s.slot) for s in opened] + [(rank, p.slot) for p in dropped for rank in p.ranks]
        for holder in (*opened, *dropped):
            self._slots.give_back(holder)
        places, self._slots.released = places + self._slots.released, []
        return _table(places, 2)

    def _inject(self, now: int) -> None:
        group = self.admission.admit(now, [*self.decoding, *self.ready], self._slots)
        for sequence in group.sequences:
            self.requests[sequence.prompt.line] = sequence.request
        self.prefilling.extend((*group.prefixes, *group.sequences))
        self.shared_tokens += sum(s.prefilled for s in group.sequences) - sum(map(left, group.prefixes))
        self._prefix_step = group.prefix_step
        self._dropped += self.prefixes.drop_unused()

    def _chunks(self, now: int) -> list[Chunk]:
        """An even share of the prompt tokens that are left to prefill before the micro-batch starts."""
        if not self.prefilling:
            return []
        prefixes = [p for p in self.prefilling if not p.with_forks]
        waiting = prefixes or self.prefilling
        end = self._prefix_step if prefixes else waiting[0].start_step
        budget = ceil(sum(map(left, waiting)) / max(end - now, 1))
        chunks = []
        for sequence in waiting:
            count = min(left(sequence), budget)
            if count == 0:
                break
            chunks.append(Chunk(sequence, sequence.prefilled, count))
            budget -= count
        return chunks


def _begun(chunks: Iterable[Chunk]) -> list[tuple[int, int, int]]:
    """(R-rank, slot, new slot) of the chunks that begin behind a prefix."""
    begun = (c.sequence for c in chunks if c.begins and c.sequence.prefix)
    return [(rank, s.prefix.slot, s.slot) for s in begun for rank in s.ranks]


def _places(chunks: Iterable[Chunk], row: int) -> list[tuple[int, int, int, int]]:
    """(R-rank, slot, first row, tokens) of chunks whose rows begin at `row`."""
    places = []
    for chunk in chunks:
        places += [(rank, chunk.sequence.slot, row, chunk.count) for rank in chunk.sequence.ranks]
        row += chunk.count
    return places


def _table(rows: Iterable[tuple[int, ...]], columns: int) -> np.ndarray:
    return np.array(list(rows), np.int32).reshape(-1, columns)
