"""The sequences that are admitted together: their R-ranks, what they share, and when they start to decode."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import numpy as np

from hpcdecode.schedule.limits import Limits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.policies.base import Policy
from hpcdecode.schedule.prefixes import Prefix, Prefixes
from hpcdecode.schedule.sequence import Sequence


class MicroBatch:
    """Grows by one sequence at a time, each with those that follow it, while they fit.

    busy: whether the lane decodes meanwhile. sequences: without their followers. prefixes: those that are new.
    """

    def __init__(
        self,
        lane: int,
        placement: Placement,
        known: Prefixes,
        limits: Limits,
        policy: Policy,
        now: int,
        busy: bool,
    ):
        self.lane, self.placement, self.known, self.limits, self.policy = lane, placement, known, limits, policy
        self.now, self.busy = now, busy
        self.sequences: list[Sequence] = []
        self.prefixes: list[Prefix] = []

    @property
    def start_step(self) -> int:
        return self.sequences[0].start_step if self.sequences else self.now

    @property
    def members(self) -> list[Sequence]:
        return [s for leader in self.sequences for s in leader.branch]

    @property
    def prefix_step(self) -> int:
        """When the new prefixes are complete, and their sequences follow: they have their share of the steps."""
        first, rest = sum(map(left, self.prefixes)), sum(map(left, self.sequences))
        if not first:
            return self.now
        steps = self.start_step - self.now
        share = round(steps * first / (first + rest))
        return self.now + max(self._steps(self.prefixes), min(share, steps - self._steps(self.sequences)))

    def admit(self, sequence: Sequence, slots: list[int]) -> bool:
        """Place the sequence, with a prefix if it can share one; False if it fits on no R-rank yet.

        slots: free ones, of which those that are needed are taken.
        """
        known = None
        if sequence.shares_prefix:
            known, length = self.known.find(sequence.input_ids)
            if length and len(slots) > len(sequence.branch):
                new = self._new_prefix(sequence.input_ids[:length], known)
                if self._admit_with_new(sequence, new):
                    new.slot = slots.pop()
                    self._take(sequence, slots)
                    return True
        if any(self._place(sequence, prefix) for prefix in dict.fromkeys((known, None))):
            self._take(sequence, slots)
            return True
        return False

    def _take(self, sequence: Sequence, slots: list[int]) -> None:
        self.sequences.append(sequence)
        self.known.remember(sequence.input_ids)
        for member in sequence.branch:
            member.slot = slots.pop()

    def _new_prefix(self, ids: list[int], known: Prefix | None) -> Prefix:
        """A prefix on every R-rank on which it fits."""
        new = Prefix(ids, known, prefilled=known.prompt_length if known else 0)
        ranks = known.ranks if known else range(len(self.placement.capacity))
        new.ranks = [r for r in ranks if self.placement.fits(r, [new, *(s for s in self.members if s.rank == r)])]
        return new

    def _admit_with_new(self, sequence: Sequence, new: Prefix) -> bool:
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
        return True

    def _place(self, sequence: Sequence, prefix: Prefix | None) -> bool:
        """Choose the R-rank of a sequence and its followers; False, and no other is changed, if they fit on none
        or the policy has them wait."""
        before = self.start_step
        sequence.begin_with(prefix)
        members = [*self.members, *sequence.branch]
        _set_start(members, self._start_with(sequence))
        ranks = self.placement.candidates(sequence, self.sequences) if self.policy.allows(members) else []
        for rank in ranks:
            if prefix and rank not in prefix.ranks:
                continue
            for member in sequence.branch:
                member.rank = rank
            changed = {rank} if sequence.start_step == before else {s.rank for s in members}
            if all(self.placement.fits(r, [s for s in members if s.rank == r]) for r in changed):
                return True
        _set_start(members, before)
        return False

    def _start_with(self, sequence: Sequence) -> int:
        steps = self._steps(self.prefixes) + self._steps([*self.sequences, sequence])
        if self.busy:  # prompts ride along with decoding: spread them evenly
            steps = ceil(steps / self.policy.period) * self.policy.period
        return self.now + steps

    def _steps(self, waiting: Iterable[Sequence | Prefix]) -> int:
        """The fewest steps in which they are prefilled."""
        return ceil(sum(map(left, waiting)) / self.limits.prefill_tokens)


def left(sequence: Sequence | Prefix) -> int:
    """Tokens that are not prefilled yet."""
    return sequence.prompt_length - sequence.prefilled


def _set_start(sequences: Iterable[Sequence], step: int) -> None:
    for sequence in sequences:
        sequence.start_step = step
