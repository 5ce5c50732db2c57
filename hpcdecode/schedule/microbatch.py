"""The sequences that are admitted together: their R-ranks, what they share, and when they start to decode."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import numpy as np

from hpcdecode.requests.prefix import KvHolder, Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Load, Placement, Trajectories
from hpcdecode.schedule.policies.base import Policy
from hpcdecode.schedule.prefixes import Beginning, Prefixes
from hpcdecode.schedule.slots import Slots


class MicroBatch:
    """Grows by one sequence at a time, each with its forks, while they fit.

    Args:
        placement: of the S-rank.
        known: prefixes of the lane.
        limits: of the lane.
        policy: of the lane.
        now: lane step from which on the micro-batch is prefilled.
        busy: whether the lane decodes meanwhile.

    Attributes:
        sequences: that were admitted, without their forks.
        members: with their forks.
        prefixes: that are new.
        lacks_room: whether a sequence that might have entered fits on no R-rank yet.
    """

    def __init__(self, placement: Placement, known: Prefixes, limits: LaneLimits, policy: Policy, now: int, busy: bool):
        self.placement, self.known, self.limits, self.policy = placement, known, limits, policy
        self.now, self.busy = now, busy
        self.sequences: list[SequenceState] = []
        self.members: list[SequenceState] = []
        self.prefixes: list[Prefix] = []
        self.lacks_room = False
        self._remaining = 0  # tokens of the sequences to prefill
        self._on: dict[int, list[SequenceState]] = {}  # members by R-rank
        self._trajectories = Trajectories(placement.state_load)  # of the members
        self._loads: dict[int, tuple[Load, int]] = {}  # by the end of a sequence that starts now; members counted

    @property
    def start_step(self) -> int:
        """Return the lane step at which the sequences start to decode."""
        return self.sequences[0].start_step if self.sequences else self.now

    @property
    def prefix_step(self) -> int:
        """Return the step at which new prefixes are complete, and their sequences follow.

        Prefixes get their share of the steps, by tokens.
        """
        first, rest = sum(map(remaining, self.prefixes)), self._remaining
        if not first:
            return self.now
        steps = self.start_step - self.now
        share = round(steps * first / (first + rest))
        return self.now + max(self._steps(first), min(share, steps - self._steps(rest)))

    def admit(self, sequence: SequenceState, slots: Slots) -> bool:
        """Place the sequence, with a prefix if it can share one; return False if it fits on no R-rank yet.

        Args:
            sequence: with its forks.
            slots: of the lane, of which those that are needed are taken.
        """
        known = None
        if sequence.swap is None and (ids := sequence.shareable_ids):
            known, length = self.known.find(ids, sequence.adapter)
            if length and len(slots) > len(sequence.with_forks):
                new = self._new_prefix(ids[:length], known, sequence.adapter)
                if self._admit_with_new(sequence, new):
                    slots.take(new)
                    self._take(sequence, slots)
                    return True
        if any(self._place(sequence, prefix) for prefix in dict.fromkeys((known, None))):
            self._take(sequence, slots)
            return True
        return False

    def share_with(self, following: Beginning, slots: Slots) -> None:
        """Make a prefix of what a prompt to come shares with a sequence that was admitted, if it fits.

        Else the sequence would prefill it, and the prefix that the prompt finds would be prefilled again.

        Args:
            following: of the prompt.
            slots: of the lane.
        """
        known, length = self.known.find(following.ids, following.adapter)
        if not length or not len(slots):
            return
        before, new = self.start_step, self._new_prefix(list(following.ids[:length]), known, following.adapter)
        sharing = self._begin_with(new)
        if not sharing:
            return
        self.placement.hold(new)
        self.prefixes.append(new)
        self._start_at(self._start_with())
        if self.policy.allows(self.members) and all(self.placement.fits(r, self._with(r)) for r in self._on):
            self.known.add(new)
            slots.take(new)
            return
        self.prefixes.pop()
        self.placement.drop(new)
        for sequence in sharing:
            sequence.begin_with(known)
        self._remaining = sum(map(remaining, self.sequences))
        self._start_at(before)

    def _begin_with(self, new: Prefix) -> list[SequenceState]:
        """Have the sequences that were admitted begin with a prefix, where they can; return these."""
        found = []
        for other in self.sequences:
            same = other.swap is None and other.prefix is new.prefix and other.rank in new.ranks
            if same and new.begins(np.array(other.shareable_ids, np.int32), other.adapter):
                other.begin_with(new)
                found.append(other)
        self._remaining = sum(map(remaining, self.sequences))
        return found

    def _take(self, sequence: SequenceState, slots: Slots) -> None:
        self.sequences.append(sequence)
        self.lacks_room = False
        self._remaining += remaining(sequence)
        self.known.remember(sequence.input_ids, sequence.adapter)
        for member in sequence.with_forks:
            slots.take(member)
            self.members.append(member)
            self._on.setdefault(member.rank, []).append(member)
            self._trajectories.add(member)

    def _new_prefix(self, ids: list[int], known: Prefix | None, adapter: int) -> Prefix:
        """Return a prefix on every R-rank on which it fits."""
        new = Prefix(ids, known, prefilled=known.prompt_length if known else 0, adapter=adapter)
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
        self._begin_with(new)  # those that were admitted before it was found
        return True

    def _place(self, sequence: SequenceState, prefix: Prefix | None) -> bool:
        """Choose the R-rank of a sequence and its forks.

        Return False, and change no other sequence, if they fit on none or the policy has them wait.
        """
        before = self.start_step
        if sequence.swap is None:
            sequence.begin_with(prefix)
        start = self._start_with(sequence)
        self._start_at(start)
        _set_start(sequence.with_forks, start)
        if self.policy.allows([*self.members, *sequence.with_forks]):
            for rank in self.placement.order(sequence, self._load_beside(sequence)):
                if (prefix and rank not in prefix.ranks) or (sequence.swap and rank != sequence.swap.rank):
                    continue
                changed = {rank} if start == before else {rank, *self._on}
                if all(self.placement.fits(r, self._with(r, sequence if r == rank else None)) for r in changed):
                    for member in sequence.with_forks:
                        member.rank = rank
                    return True
            self.lacks_room = True
        self._start_at(before)
        return False

    def _start_with(self, sequence: SequenceState | None = None) -> int:
        """Return the step at which the micro-batch starts if it has this sequence, too."""
        more = remaining(sequence) if sequence else 0
        steps = self._steps(sum(map(remaining, self.prefixes))) + self._steps(self._remaining + more)
        if self.busy:  # prompts ride along with decoding: spread them evenly
            steps = ceil(steps / self.policy.period) * self.policy.period
        return self.now + steps

    def _start_at(self, step: int) -> None:
        """Let all members start at this step."""
        if self.members and step != self.start_step:
            self._trajectories.shift(step - self.start_step)
            self._loads.clear()
            _set_start(self.members, step)

    def _with(self, rank: int, sequence: SequenceState | None = None) -> list[SequenceState]:
        """Return the members on an R-rank, and a sequence with its forks."""
        return [*self._on.get(rank, ()), *(sequence.with_forks if sequence else ())]

    def _load_beside(self, new: SequenceState) -> Load:
        """Return the tokens that each R-rank attends to for the lane and the members while `new` decodes."""
        load, counted = self._loads.get(new.end_step) or (self.placement.attention_load(new), 0)
        if counted < len(self.members):
            load = load + self._trajectories.attention_load(new, len(load), counted)
        self._loads[new.end_step] = load, len(self.members)
        return load

    def _steps(self, tokens: int) -> int:
        """Return the fewest steps in which so many tokens are prefilled."""
        return ceil(tokens / (self.policy.prefill_tokens if self.busy else self.limits.prefill_tokens))


def remaining(holder: KvHolder) -> int:
    """Return the tokens that are not prefilled yet."""
    return holder.prompt_length - holder.prefilled


def _set_start(sequences: Iterable[SequenceState], step: int) -> None:
    for sequence in sequences:
        sequence.start_step = step
