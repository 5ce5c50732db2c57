"""The fixed-F injector (FastDecode, section 4.2): a micro-batch every F steps, so that the R-load stays level.

B sequences of S steps each are in flight in the steady state; M = B*F/S of them enter every F steps. The
prompts of a micro-batch are prefilled over the F steps before it starts to decode. Rows that end early leave
room that the next injection fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import numpy as np

from hpcdecode.data.tokens import Prompt
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.sequence import Sequence, branches_of, family_of
from hpcdecode.schedule.stops import Stops


class Feed(Protocol):
    """Where admitted rows come from."""

    def peek(self) -> Prompt | None:
        """The next prompt, or None when there are no more."""

    def pop(self) -> Prompt: ...

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt and record why."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt that is prefilled in one step: tokens [start, start + count) of its sequence."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        return self.start + self.count == self.sequence.prompt_length


@dataclass(frozen=True, slots=True)
class Step:
    """A plan with the sequences behind it, for the S-rank."""

    plan: Plan
    decode: list[Sequence]
    prefill: list[Chunk]

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a token in this step, in the order of their logits."""
        return self.decode + [s for c in self.prefill if c.completes for s in c.sequence.branch]


@dataclass(frozen=True, slots=True)
class Limits:
    """batch, period, steps: B, F and S of this lane. prefill_tokens: most prompt tokens in one step.
    max_positions: the model's context. slots: sequences the lane may hold at once, in prefill or decoding."""

    batch: int
    period: int
    steps: int
    prefill_tokens: int
    max_positions: int | None

    @property
    def slots(self) -> int:
        return 2 * self.batch


class Injector:
    """Admits rows to one lane and turns its state into a plan a step."""

    def __init__(self, lane: int, feed: Feed, placement: Placement, limits: Limits, stops: Stops):
        self.lane, self.feed, self.placement, self.limits, self.stops = lane, feed, placement, limits, stops
        self.families: dict[int, list[Sequence]] = {}  # of the rows in flight, by line
        self.waiting: deque[Sequence] = deque()  # of the row that was admitted last, not placed yet
        self.prefilling: deque[Sequence] = deque()  # others follow them
        self.ready: list[Sequence] = []  # prefilled, waiting for their micro-batch to start
        self.decoding: list[Sequence] = []
        self._forks: list[tuple[int, int, int]] = []  # R-rank, slot, new slot: for the next plan
        self._freed: list[Sequence] = []  # finished, to be released by the next plan
        self._slots = list(range(limits.slots))[::-1]
        self._injections = 0
        self._next_injection = 0

    @property
    def active(self) -> int:
        return len(self.decoding) + len(self.ready) + sum(len(s.branch) for s in self.prefilling)

    @property
    def tokens_in_flight(self) -> int:
        return sum(s.length for s in (*self.decoding, *self.ready, *self.prefilling))

    def exhausted(self) -> bool:
        """No sequence in flight and no row left to admit."""
        return not self.active and not self.waiting and self.feed.peek() is None

    def next_step(self, now: int) -> Step:
        """The plan of lane step `now`; it runs no model if there is nothing to do but to wait for room."""
        release = self._release()
        started = [s for s in self.ready if s.start_step <= now]
        self.decoding += started
        self.ready = [s for s in self.ready if s.start_step > now]
        if now >= self._next_injection and not self.prefilling:
            self._inject(now)
        chunks = self._chunks(now)
        forks, self._forks = self._forks, []
        plan = Plan(
            release=release,
            fork=_table(forks, 3),
            decode=_table(((s.rank, s.slot) for s in self.decoding), 2),
            prefill=_table(((c.sequence.rank, c.sequence.slot, c.count) for c in chunks), 3),
        )
        return Step(plan, list(self.decoding), chunks)

    def stop_plan(self) -> Plan:
        """The lane's last plan: it frees what has finished, for the lanes that go on."""
        return Plan(release=self._release(), stop=True)

    def commit(self, step: Step, tokens: Seq[int]) -> list[list[Sequence]]:
        """Take the sampled token of each sequence in `step.sampled`; returns the rows that are finished."""
        finished = []
        for sequence, token in zip(step.sampled, tokens, strict=True):
            sequence.accept(token, self.stops)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        for chunk in step.prefill:
            chunk.sequence.prefilled += chunk.count
            if chunk.completes:
                self._part(self.prefilling.popleft())
        if not finished:
            return []
        self.decoding = [s for s in self.decoding if s.finish_reason is None]
        self._freed += finished
        lines = dict.fromkeys(s.prompt.line for s in finished)
        return [self.families.pop(line) for line in lines if all(s.finish_reason for s in self.families[line])]

    def _part(self, leader: Sequence) -> None:
        """The samples of a prompt go their own ways; the first that goes on takes the prompt's slot over."""
        going = [s for s in leader.branch if s.finish_reason is None]
        heir = going[0] if going else leader
        heir.slot, leader.slot = leader.slot, heir.slot
        for sequence in leader.branch:
            sequence.prefilled = leader.prefilled
            if sequence is heir:
                continue
            if sequence.finish_reason is None:
                self._forks.append((leader.rank, heir.slot, sequence.slot))
            else:  # its slot was never opened
                self._slots.append(sequence.slot)
                sequence.slot = -1
        self.ready += going

    def _release(self) -> np.ndarray:
        freed, self._freed = self._freed, []
        for sequence in freed:
            self.placement.remove(sequence)
        opened = [s for s in freed if s.slot >= 0]
        self._slots += [s.slot for s in opened]
        return _table(((s.rank, s.slot) for s in opened), 2)

    def _inject(self, now: int) -> None:
        """Admit the micro-batch that starts to decode when its prompts are prefilled, a period from now."""
        limits = self.limits
        self._injections += 1
        self._next_injection = now + limits.period
        target = min(limits.batch, ceil(limits.batch * limits.period * self._injections / limits.steps))
        ending = sum(s.end_step < now + limits.period for s in (*self.decoding, *self.ready))
        room = target - (self.active - ending)
        group: list[Sequence] = []
        while (branches := self._next_branches()) is not None:
            first = branches[0]
            count = len(first.branch)
            if count > min(room, len(self._slots)) or not self._place(group, first, now):
                break
            if not self.waiting:
                self.feed.pop()
                self.waiting += branches
                self.families[first.prompt.line] = first.family
            group.append(self.waiting.popleft())
            for sequence in first.branch:
                sequence.slot = self._slots.pop()
            room -= count
        for sequence in (s for first in group for s in first.branch):
            self.placement.add(sequence)
        self.prefilling.extend(group)
        if group and not (self.decoding or self.ready):
            self._next_injection = group[0].start_step

    def _next_branches(self) -> Seq[Sequence] | None:
        """What is to be admitted next: the rest of a row, or the next row that this lane can run, or nothing."""
        while not self.waiting and (prompt := self.feed.peek()) is not None:
            max_new = prompt.params.max_tokens
            if self.limits.max_positions is not None:
                max_new = min(max_new, self.limits.max_positions - len(prompt.token_ids))
            branches = branches_of(family_of(prompt, max_new, self.lane, self.stops), self.placement.block_tokens)
            problem = self._problem(branches)
            if problem is None:
                return branches
            self.feed.refuse(prompt, problem)
        return self.waiting or None

    def _place(self, group: list[Sequence], sequence: Sequence, now: int) -> bool:
        """Choose the sequence's R-rank; False, and nothing changed, if it fits on none yet."""
        before = group[0].start_step if group else now
        leaders = [*group, sequence]
        members = [s for leader in leaders for s in leader.branch]
        _set_start(members, self._start_step(leaders, now))
        for rank in self.placement.candidates(self.lane, group):
            for member in sequence.branch:
                member.rank = rank
            changed = {rank} if sequence.start_step == before else {s.rank for s in members}
            if all(self.placement.fits(r, [s for s in members if s.rank == r]) for r in changed):
                return True
        _set_start(members, before)
        return False

    def _start_step(self, group: list[Sequence], now: int) -> int:
        steps = ceil(sum(s.prompt_length for s in group) / self.limits.prefill_tokens)
        if self.decoding or self.ready:  # prompts ride along with decoding: spread them evenly
            steps = ceil(steps / self.limits.period) * self.limits.period
        return now + steps

    def _chunks(self, now: int) -> list[Chunk]:
        """An even share of the prompt tokens that are left to prefill before the micro-batch starts."""
        if not self.prefilling:
            return []
        pending = sum(s.prompt_length - s.prefilled for s in self.prefilling)
        budget = ceil(pending / max(self.prefilling[0].start_step - now, 1))
        chunks = []
        for sequence in self.prefilling:
            count = min(sequence.prompt_length - sequence.prefilled, budget)
            if count == 0:
                break
            chunks.append(Chunk(sequence, sequence.prefilled, count))
            budget -= count
        return chunks

    def _problem(self, branches: Seq[Sequence]) -> str | None:
        """Why this lane can never run a row, if it cannot."""
        most, capacity = max(len(s.branch) for s in branches), max(self.placement.capacity)
        if most > self.limits.batch:
            return (
                f"n: expected at most {self.limits.batch} (the batch of a lane), got {most}; raise --batch, or lower n"
            )
        if all(self.placement.tokens(s.branch) <= capacity for s in branches):
            return None
        first = branches[0]
        samples = f" for each of {most} samples" if most > 1 else ""
        return (
            f"needs {max(self.placement.tokens(s.branch) for s in branches)} tokens of KV cache "
            f"({len(first.prompt.token_ids)} of the prompt and up to {first.max_new} new{samples}), but an R-rank "
            f"holds {capacity}: raise --kv-memory, or lower max_tokens{' or n' if samples else ''}"
        )


def _set_start(sequences: Iterable[Sequence], step: int) -> None:
    for sequence in sequences:
        sequence.start_step = step


def _table(rows: Iterable[tuple[int, ...]], columns: int) -> np.ndarray:
    return np.array(list(rows), np.int32).reshape(-1, columns)
