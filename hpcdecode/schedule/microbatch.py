"""The sequences that are admitted together: their R-ranks, what they share, and when they start to decode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from math import ceil

import numpy as np

from hpcdecode.requests.prefix import Prefix, remaining
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Load, Placement, Trajectories, own_load
from hpcdecode.schedule.policies.base import Policy
from hpcdecode.schedule.prefixes import Beginning, Prefixes
from hpcdecode.schedule.slots import Slots
from hpcdecode.schedule.spread import has_many


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
        dropped: prefixes that were given up for it, or that nothing uses.
        lacks_room: whether a sequence that might have entered fits on no R-rank yet.
    """

    def __init__(self, placement: Placement, known: Prefixes, limits: LaneLimits, policy: Policy, now: int, busy: bool):
        self.placement, self.known, self.limits, self.policy = placement, known, limits, policy
        self.now, self.busy = now, busy
        self.sequences: list[SequenceState] = []
        self.members: list[SequenceState] = []
        self.prefixes: list[Prefix] = []
        self.dropped: list[Prefix] = []
        self.lacks_room = False
        self._remaining = 0  # tokens of the sequences to prefill
        self._on: dict[int, list[SequenceState]] = {}  # members by R-rank
        self._trajectories = Trajectories(placement.reach)  # of the members
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
        for prefix in self._ways(sequence, len(slots) > len(sequence.with_forks)):
            if prefix is None or prefix.slot >= 0:
                placed = self._place(sequence, prefix)
            elif placed := self._place_with_new(sequence, prefix):
                slots.take(prefix)
            if placed:
                self._take(sequence, slots)
                self._start_earlier()
                return True
        return False

    def _ways(self, sequence: SequenceState, may_add: bool) -> Iterator[Prefix | None]:
        """Yield what a sequence might begin with, the best first: prefixes, new ones among them, and None."""
        ids, adapter = sequence.shareable_ids, sequence.adapter
        if sequence.swap is None and ids:
            known, length = self.known.find(ids, adapter)
            copied = ids[: known[0].prompt_length] if known else []
            may_copy = may_add and known and self.known.has_room(len(copied))
            if may_add and length:
                yield from self._new_prefixes(ids[:length], sequence)
            elif may_copy and all(map(self._has_many, known)):
                yield from self._new_prefixes(copied, sequence, 2 * sum(len(p.ranks) for p in known))
            yield from sorted(known, key=lambda p: self._users(p) / len(p.ranks))
            if may_copy:
                yield from self._new_prefixes(copied, sequence)
        yield None

    def share_with(self, following: Beginning, slots: Slots) -> None:
        """Make a prefix of what a prompt to come shares with a sequence that was admitted, if it fits.

        Else the sequence would prefill it, and the prefix that the prompt finds would be prefilled again.

        Args:
            following: of the prompt.
            slots: of the lane.
        """
        length = self.known.find(following.ids, following.adapter).new_tokens
        if not length or not len(slots):
            return
        before, parents = self.start_step, {s.key: s.prefix for s in self.sequences}
        for new in self._new_prefixes(list(following.ids[:length]), self.sequences[-1]):
            if sharing := self._begin_with(new):
                break
        else:
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
            sequence.begin_with(parents[sequence.key])
        self._remaining = sum(map(remaining, self.sequences))
        self._start_at(before)

    def _begin_with(self, new: Prefix) -> list[SequenceState]:
        """Have the sequences that were admitted begin with a prefix, where they can; return these."""
        found = []
        for other in self.sequences:
            same = other.swap is None and other.prefix is new.prefix and other.rank in new.ranks
            if same and _begins(other, new):
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

    def _new_prefixes(self, ids: list[int], sequence: SequenceState, least: int = 1) -> Iterator[Prefix]:
        """Yield a prefix for a sequence on the R-ranks that suit it best and hold no copy; none if it fits nowhere."""
        adapter, all_ranks = sequence.adapter, len(self.placement.capacity)
        holding = {rank for copy in self.known.copies(ids, adapter) for rank in copy.ranks}
        if len(holding) == all_ranks:
            return
        lane = len(self.known.live), all_ranks, self.limits.most, self.limits.prefix_room
        count = max(self.limits.spread.ranks(len(ids), *lane), least)
        load = self._load_beside(sequence) + self._load_to_come(sequence)
        order = [r for r in self.placement.order(sequence, load) if r not in holding]
        new = Prefix(ids, None, adapter=adapter)
        order.sort(key=[s.rank for s in self.sequences if s.swap is None and _begins(s, new)].count, reverse=True)
        for parent in (*self.known.shorter(ids, adapter), None):
            new.prefix, new.prefilled = parent, parent.prompt_length if parent else 0
            fitting = (r for r in order if parent is None or r in parent.ranks)
            fitting = (r for r in fitting if self.placement.fits(r, [new, *self._on.get(r, ())]))
            if ranks := sorted(islice(fitting, count)):
                new.ranks = ranks
                yield new
                return

    def _load_to_come(self, sequence: SequenceState) -> Load:
        """Return the tokens that rows to come will attend to on each R-rank, which share prefixes, if all are alike."""
        load = np.zeros(len(self.placement.capacity))
        for prefix in self.known.live:
            if prefix.prompt_length > self.limits.spread.common:
                rows = self.limits.spread.rows - prefix.users
                load[prefix.ranks] += max(rows, 0) / len(prefix.ranks)
        return load * own_load(sequence, self.placement.reach)

    def _has_many(self, prefix: Prefix) -> bool:
        """Return whether so many sequences begin with a prefix that a copy should be made."""
        return has_many(self._users(prefix), len(prefix.ranks), len(self.placement.capacity), self.limits.most)

    def _users(self, prefix: Prefix) -> int:
        """Return how many sequences, or longer prefixes, begin with a prefix, members among them."""
        return prefix.users + sum(member.prefix is prefix for member in self.members)

    def _place_with_new(self, sequence: SequenceState, new: Prefix) -> bool:
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

    def _start_earlier(self) -> None:
        """Let all members start once they are prefilled, if that is sooner than was planned and they fit then.

        It is sooner if the last of them shares a new prefix with others, which had more to prefill before.
        """
        before, step = self.start_step, self._start_with()
        if step < before:
            self._start_at(step)
            if not self.policy.allows(self.members) or not all(self.placement.fits(r, self._with(r)) for r in self._on):
                self._start_at(before)

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


def _begins(sequence: SequenceState, prefix: Prefix) -> bool:
    return prefix.begins(np.array(sequence.shareable_ids, np.int32), sequence.adapter)


def _set_start(sequences: Iterable[SequenceState], step: int) -> None:
    for sequence in sequences:
        sequence.start_step = step
