"""The sequences that are admitted together: their R-ranks, what they share, and when they start to decode."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import numpy as np

from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Courses, Placement
from hpcdecode.schedule.policies.base import Policy
from hpcdecode.schedule.prefixes import Prefixes
from hpcdecode.schedule.slots import SlotPool


class MicroBatch:
    """Grows by one sequence at a time, each with those that follow it, while they fit.

    busy: whether the lane decodes meanwhile. sequences: without their followers. prefixes: those that are new.
    """

    def __init__(
        self,
        lane: int,
        placement: Placement,
        known: Prefixes,
        limits: LaneLimits,
        policy: Policy,
        now: int,
        busy: bool,
    ):
        self.lane, self.placement, self.known, self.limits, self.policy = lane, placement, known, limits, policy
        self.now, self.busy = now, busy
        self.sequences: list[SequenceState] = []
        self.members: list[SequenceState] = []  # with their followers
        self.prefixes: list[Prefix] = []
        self._left = 0  # tokens of the sequences to prefill
        self._on: dict[int, list[SequenceState]] = {}  # members by R-rank
        self._courses = Courses()  # of the members
        self._reads: dict[int, tuple[np.ndarray, int]] = {}  # by the end of a sequence that starts now

    @property
    def start_step(self) -> int:
        return self.sequences[0].start_step if self.sequences else self.now

    @property
    def prefix_step(self) -> int:
        """When the new prefixes are complete, and their sequences follow: they have their share of the steps."""
        first, rest = sum(map(left, self.prefixes)), self._left
        if not first:
            return self.now
        steps = self.start_step - self.now
        share = round(steps * first / (first + rest))
        return self.now + max(self._steps(first), min(share, steps - self._steps(rest)))

    def admit(self, sequence: SequenceState, slots: SlotPool) -> bool:
        """Place the sequence, with a prefix if it can share one; False if it fits on no R-rank yet.

        slots: free ones, of which those that are needed are taken.
        """
        known = None
        if sequence.shares_prefix:
            known, length = self.known.find(sequence.input_ids)
            if length and len(slots) > len(sequence.with_forks):
                new = self._new_prefix(sequence.input_ids[:length], known)
                if self._admit_with_new(sequence, new):
                    slots.take(new)
                    self._take(sequence, slots)
                    return True
        if any(self._place(sequence, prefix) for prefix in dict.fromkeys((known, None))):
            self._take(sequence, slots)
            return True
        return False

    def _take(self, sequence: SequenceState, slots: SlotPool) -> None:
        self.sequences.append(sequence)
        self._left += left(sequence)
        self.known.remember(sequence.input_ids)
        for member in sequence.with_forks:
            slots.take(member)
            self.members.append(member)
            self._on.setdefault(member.rank, []).append(member)
            self._courses.add(member)

    def _new_prefix(self, ids: list[int], known: Prefix | None) -> Prefix:
        """A prefix on every R-rank on which it fits."""
        new = Prefix(ids, known, prefilled=known.prompt_length if known else 0)
        ranks = known.ranks if known else range(len(self.placement.capacity))
        new.ranks = [r for r in ranks if self.placement.fits(r, [new, *self._on.get(r, ())])]
        return new

    def _admit_with_new(self, sequence: SequenceState, new: Prefix) -> bool:
        self.placement.hold(new)
        self.prefixes.append(new)
        if not self._place(sequence, new):
            self.prefixes.pop()
            self.placement.drop(new)
            return False
        self.known.add(new)
        for other in self.sequences:  # admitted before it was found
            same = other.shares_prefix and other.prefix is new.prefix and other.rank in new.ranks
            if same and new.begins(np.array(other.input_ids, np.int32)):
                other.begin_with(new)
        self._left = sum(map(left, self.sequences))
        return True

    def _place(self, sequence: SequenceState, prefix: Prefix | None) -> bool:
        """Choose the R-rank of a sequence and its followers; False, and no other is changed, if they fit on none
        or the policy has them wait."""
        before = self.start_step
        sequence.begin_with(prefix)
        start = self._start_with(sequence)
        self._start_at(start)
        _set_start(sequence.with_forks, start)
        if self.policy.allows([*self.members, *sequence.with_forks]):
            for rank in self.placement.order(sequence, self._reads_with(sequence)):
                if prefix and rank not in prefix.ranks:
                    continue
                changed = {rank} if start == before else {rank, *self._on}
                if all(self.placement.fits(r, self._with(r, sequence if r == rank else None)) for r in changed):
                    for member in sequence.with_forks:
                        member.rank = rank
                    return True
        self._start_at(before)
        return False

    def _start_with(self, sequence: SequenceState) -> int:
        steps = self._steps(sum(map(left, self.prefixes))) + self._steps(self._left + left(sequence))
        if self.busy:  # prompts ride along with decoding: spread them evenly
            steps = ceil(steps / self.policy.period) * self.policy.period
        return self.now + steps

    def _start_at(self, step: int) -> None:
        """All members start at this step."""
        if self.members and step != self.start_step:
            self._courses.shift(step - self.start_step)
            self._reads.clear()
            _set_start(self.members, step)

    def _with(self, rank: int, sequence: SequenceState | None) -> list[SequenceState]:
        """The members on an R-rank, and a sequence with those that follow it."""
        return [*self._on.get(rank, ()), *(sequence.with_forks if sequence else ())]

    def _reads_with(self, new: SequenceState) -> np.ndarray:
        """Tokens that each R-rank attends to for the lane and the members while `new` decodes, float64 [ranks]."""
        reads, counted = self._reads.get(new.end_step) or (self.placement.reads(new), 0)
        if counted < len(self.members):
            reads = reads + self._courses.reads(new, len(reads), counted)
        self._reads[new.end_step] = reads, len(self.members)
        return reads

    def _steps(self, tokens: int) -> int:
        """The fewest steps in which they are prefilled."""
        return ceil(tokens / self.limits.prefill_tokens)


def left(sequence: SequenceState | Prefix) -> int:
    """Tokens that are not prefilled yet."""
    return sequence.prompt_length - sequence.prefilled


def _set_start(sequences: Iterable[SequenceState], step: int) -> None:
    for sequence in sequences:
        sequence.start_step = step
