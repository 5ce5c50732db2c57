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
from hpcdecode.schedule.sequence import Sequence
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
        return self.decode + [c.sequence for c in self.prefill if c.completes]


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

    def __init__(self, lane: int, feed: Feed, placement: Placement, limits: Limits):
        self.lane, self.feed, self.placement, self.limits = lane, feed, placement, limits
        self.decoding: list[Sequence] = []
        self.prefilling: deque[Sequence] = deque()
        self.ready: list[Sequence] = []  # prefilled, waiting for their micro-batch to start
        self._freed: list[Sequence] = []  # finished, to be released by the next plan
        self._slots = list(range(limits.slots))[::-1]
        self._injections = 0
        self._next_injection = 0

    @property
    def active(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.ready)

    @property
    def tokens_in_flight(self) -> int:
        return sum(s.length for s in (*self.decoding, *self.ready, *self.prefilling))

    def exhausted(self) -> bool:
        """No sequence in flight and no row left to admit."""
        return not self.active and self.feed.peek() is None

    def next_step(self, now: int) -> Step:
        """The plan of lane step `now`; it runs no model if there is nothing to do but to wait for room."""
        release = self._release()
        started = [s for s in self.ready if s.start_step <= now]
        self.decoding += started
        self.ready = [s for s in self.ready if s.start_step > now]
        if now >= self._next_injection and not self.prefilling:
            self._inject(now)
        chunks = self._chunks(now)
        plan = Plan(
            release=release,
            decode=_table(((s.rank, s.slot) for s in self.decoding), 2),
            prefill=_table(((c.sequence.rank, c.sequence.slot, c.count) for c in chunks), 3),
        )
        return Step(plan, list(self.decoding), chunks)

    def stop_plan(self) -> Plan:
        """The lane's last plan: it frees what has finished, for the lanes that go on."""
        return Plan(release=self._release(), stop=True)

    def commit(self, step: Step, tokens: Seq[int], stops: Stops) -> list[Sequence]:
        """Take the sampled token of each sequence in `step.sampled`; returns the sequences that are finished."""
        for chunk in step.prefill:
            chunk.sequence.prefilled += chunk.count
            if chunk.completes:
                self.ready.append(self.prefilling.popleft())
        finished = []
        for sequence, token in zip(step.sampled, tokens, strict=True):
            sequence.accept(token, stops)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        if finished:
            self.decoding = [s for s in self.decoding if s.finish_reason is None]
            self.ready = [s for s in self.ready if s.finish_reason is None]
            self._freed += finished
        return finished

    def _release(self) -> np.ndarray:
        freed, self._freed = self._freed, []
        for sequence in freed:
            self.placement.remove(sequence)
            self._slots.append(sequence.slot)
        return _table(((s.rank, s.slot) for s in freed), 2)

    def _inject(self, now: int) -> None:
        """Admit the micro-batch that starts to decode when its prompts are prefilled, a period from now."""
        limits = self.limits
        self._injections += 1
        self._next_injection = now + limits.period
        target = min(limits.batch, ceil(limits.batch * limits.period * self._injections / limits.steps))
        ending = sum(s.end_step < now + limits.period for s in (*self.decoding, *self.ready))
        room = target - (self.active - ending)
        group: list[Sequence] = []
        while len(group) < room and self._slots and (prompt := self.feed.peek()) is not None:
            sequence = self._new_sequence(prompt)
            if not self.placement.fits_alone(sequence.final_length):
                self.feed.refuse(prompt, self._too_long(sequence))
                continue
            if not self._place(group, sequence, now):
                break
            self.feed.pop()
            sequence.slot = self._slots.pop()
            group.append(sequence)
        for sequence in group:
            self.placement.add(sequence)
        self.prefilling.extend(group)
        if group and not (self.decoding or self.ready):
            self._next_injection = group[0].start_step

    def _new_sequence(self, prompt: Prompt) -> Sequence:
        max_new = prompt.params.max_tokens - prompt.resumed
        if self.limits.max_positions is not None:
            max_new = min(max_new, self.limits.max_positions - len(prompt.token_ids))
        return Sequence(prompt, max_new, self.lane, rank=-1, slot=-1, start_step=0)

    def _place(self, group: list[Sequence], sequence: Sequence, now: int) -> bool:
        """Choose the sequence's R-rank; False, and nothing changed, if it fits on none yet."""
        before = group[0].start_step if group else now
        members = [*group, sequence]
        self._set_start(members, now)
        for rank in self.placement.candidates(self.lane, group):
            sequence.rank = rank
            changed = {rank} if sequence.start_step == before else {s.rank for s in members}
            if all(self.placement.fits(r, [s for s in members if s.rank == r]) for r in changed):
                return True
        for member in group:
            member.start_step = before
        return False

    def _set_start(self, members: list[Sequence], now: int) -> None:
        steps = ceil(sum(s.prompt_length for s in members) / self.limits.prefill_tokens)
        if self.decoding or self.ready:  # prompts ride along with decoding: spread them evenly
            steps = ceil(steps / self.limits.period) * self.limits.period
        for sequence in members:
            sequence.start_step = now + steps

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

    def _too_long(self, sequence: Sequence) -> str:
        return (
            f"needs {sequence.final_length} tokens of KV cache ({sequence.prompt_length} of the prompt and up to "
            f"{sequence.max_new} new), but an R-rank holds {max(self.placement.capacity)}: raise --kv-memory, or "
            "lower max_tokens"
        )


def _table(rows: Iterable[tuple[int, ...]], columns: int) -> np.ndarray:
    return np.array(list(rows), np.int32).reshape(-1, columns)
