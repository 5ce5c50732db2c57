"""The fixed-F injector (FastDecode, section 4.2): a micro-batch every F steps, so that the R-load stays level.

B sequences of S steps each are in flight in the steady state; M = B*F/S of them enter every F steps. The
prompts of a micro-batch are prefilled over the F steps before it starts to decode. Rows that end early leave
room that the next injection fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import ceil
from typing import Protocol

import numpy as np

from hpcdecode.data.tokens import Prompt
from hpcdecode.schedule.microbatch import Limits, MicroBatch, left
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.prefixes import Prefix, Prefixes
from hpcdecode.schedule.sequence import Sequence, branches_of, family_of
from hpcdecode.schedule.step import Chunk, Step
from hpcdecode.schedule.stops import Stops


class Feed(Protocol):
    """Where admitted rows come from."""

    def peek(self) -> Prompt | None:
        """The next prompt, or None when there are no more."""

    def pop(self) -> Prompt: ...

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt and record why."""


class Injector:
    """Admits rows to one lane and turns its state into a plan a step."""

    def __init__(self, lane: int, feed: Feed, placement: Placement, limits: Limits, stops: Stops):
        self.lane, self.feed, self.placement, self.limits, self.stops = lane, feed, placement, limits, stops
        self.prefixes = Prefixes(placement.block_tokens, limits.prefix_tokens)
        self.shared_tokens = 0  # of prompts, not prefilled because they lie in prefixes
        self.families: dict[int, list[Sequence]] = {}  # of the rows in flight, by line
        self.waiting: deque[Sequence] = deque()  # of the row that was admitted last, not placed yet
        self.prefilling: deque[Sequence | Prefix] = deque()  # others follow them; prefixes come first
        self.ready: list[Sequence] = []  # prefilled, waiting for their micro-batch to start
        self.decoding: list[Sequence] = []
        self._forks: list[tuple[int, int, int]] = []  # R-rank, slot, new slot: for the next plan
        self._closed: list[tuple[int, int]] = []  # R-rank, slot that is released and not free: of beams
        self._freed: list[Sequence] = []  # finished, to be released by the next plan
        self._dropped: list[Prefix] = []  # the same of prefixes
        self._slots = list(range(limits.slots))[::-1]
        self._injections = 0
        self._next_injection = 0
        self._prefix_step = 0  # when the prefixes in `prefilling` are complete

    @property
    def active(self) -> int:
        return len(self.decoding) + len(self.ready) + sum(len(s.branch) for s in self.prefilling)

    @property
    def tokens_in_flight(self) -> int:
        return sum(s.length for s in (*self.decoding, *self.ready)) + sum(s.prefilled for s in self.prefilling)

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
        forks, self._forks = self._forks + _begun(chunks), []
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
        return Plan(release=self._release(), stop=True)

    def commit(self, step: Step, tokens: Seq[int]) -> list[list[Sequence]]:
        """Take the sampled token of each sequence in `step.sampled`; returns the rows that are finished."""
        for family in {id(s.family): s.family for s in step.sampled if s.beams}.values():
            self._move(family)
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
                self._part(chunk.sequence)
        if not finished:
            return []
        self.decoding = [s for s in self.decoding if s.finish_reason is None]
        self._freed += finished
        lines = dict.fromkeys(s.prompt.line for s in finished)
        return [self.families.pop(line) for line in lines if all(s.finish_reason for s in self.families[line])]

    def _move(self, family: list[Sequence]) -> None:
        """Beams go on as their search says: the first child of a beam takes its slot over, others fork from it."""
        beams = family[0].beams
        if not beams.moves:
            for sequence, hypothesis in zip(family, beams.best, strict=True):
                sequence.end_as(hypothesis)
            return
        before = [s.generated for s in family]
        for sequence, move in zip(family, beams.moves, strict=True):
            sequence.generated = [*before[move.parent], move.token]
        if not before[0]:
            return  # the prompt's slot is forked where it is parted
        slots = [s.slot for s in family]
        parents = [move.parent for move in beams.moves]
        unused = [slots[beam] for beam in range(len(family)) if beam not in parents]
        self._closed += [(family[0].rank, slot) for slot in unused]
        for place, (sequence, parent) in enumerate(zip(family, parents, strict=True)):
            if parent in parents[:place]:
                sequence.slot = unused.pop()
                self._forks.append((sequence.rank, slots[parent], sequence.slot))
            else:
                sequence.slot = slots[parent]

    def _part(self, leader: Sequence | Prefix) -> None:
        """The samples of a prompt go their own ways; the first that goes on takes the prompt's slot over."""
        if not leader.branch:
            return
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
        dropped, self._dropped = self._dropped, []
        for sequence in freed:
            self.placement.remove(sequence)
        for prefix in dropped:
            self.placement.drop(prefix)
        opened = [s for s in freed if s.slot >= 0]
        self._slots += [s.slot for s in (*opened, *dropped)]
        places = [(s.rank, s.slot) for s in opened] + [(rank, p.slot) for p in dropped for rank in p.ranks]
        places, self._closed = places + self._closed, []
        return _table(places, 2)

    def _inject(self, now: int) -> None:
        """Admit the micro-batch that starts to decode when its prompts are prefilled, a period from now."""
        limits = self.limits
        self._injections += 1
        self._next_injection = now + limits.period
        target = min(limits.batch, ceil(limits.batch * limits.period * self._injections / limits.steps))
        ending = sum(s.end_step < now + limits.period for s in (*self.decoding, *self.ready))
        room = target - (self.active - ending)
        busy = bool(self.decoding or self.ready)
        group = MicroBatch(self.lane, self.placement, self.prefixes, limits, now, busy)
        while (branches := self._next_branches()) is not None:
            first = branches[0]
            count = len(first.branch)
            if count > min(room, len(self._slots)) or not group.admit(first, self._slots):
                break
            if not self.waiting:
                self.feed.pop()
                self.waiting += branches
                self.families[first.prompt.line] = first.family
            self.waiting.popleft()
            room -= count
        for sequence in group.members:
            self.placement.add(sequence)
            if sequence.prefix:
                sequence.prefix.users += 1
        self.prefilling.extend((*group.prefixes, *group.sequences))
        self.shared_tokens += sum(s.prefilled for s in group.sequences) - sum(map(left, group.prefixes))
        self._prefix_step = group.prefix_step
        self._dropped += self.prefixes.drop_unused()
        if group.sequences and not busy:
            self._next_injection = group.start_step

    def _next_branches(self) -> Seq[Sequence] | None:
        """What is to be admitted next: the rest of a row, or the next row that this lane can run, or nothing."""
        while not self.waiting and (prompt := self.feed.peek()) is not None:
            branches = row_branches(prompt, self.lane, self.limits, self.placement, self.stops)
            problem = problem_of(branches, self.limits, self.placement)
            if problem is None:
                return branches
            self.feed.refuse(prompt, problem)
        return self.waiting or None

    def _chunks(self, now: int) -> list[Chunk]:
        """An even share of the prompt tokens that are left to prefill before the micro-batch starts."""
        if not self.prefilling:
            return []
        prefixes = [p for p in self.prefilling if not p.branch]
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


def row_branches(prompt: Prompt, lane: int, limits: Limits, placement: Placement, stops: Stops) -> list[Sequence]:
    """What is to be prefilled of a row: the sequences from which its samples go on."""
    max_new = prompt.params.max_tokens
    if limits.max_positions is not None:
        max_new = min(max_new, limits.max_positions - len(prompt.token_ids))
    return branches_of(family_of(prompt, max_new, lane, stops), placement.block_tokens)


def problem_of(branches: Seq[Sequence], limits: Limits, placement: Placement) -> str | None:
    """Why a lane can never run a row, if it cannot."""
    most, capacity = max(len(s.branch) for s in branches), max(placement.capacity)
    if most > limits.batch:
        return f"n: expected at most {limits.batch} (the batch of a lane), got {most}; raise batch, or lower n"
    if all(placement.tokens(s.branch) <= capacity for s in branches):
        return None
    first = branches[0]
    samples = f" for each of {most} samples" if most > 1 else ""
    return (
        f"needs {max(placement.tokens(s.branch) for s in branches)} tokens of KV cache "
        f"({len(first.prompt.token_ids)} of the prompt and up to {first.max_new} new{samples}), but an R-rank "
        f"holds {capacity}: raise kv_memory, or lower max_tokens{' or n' if samples else ''}"
    )


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
