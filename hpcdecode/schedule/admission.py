"""Which rows enter a lane, and when: its policy decides, within the R-ranks' KV capacity."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Protocol

from hpcdecode.data.tokens import Prompt
from hpcdecode.schedule.limits import Limits
from hpcdecode.schedule.microbatch import MicroBatch
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.policies import policy_of
from hpcdecode.schedule.prefixes import Prefixes
from hpcdecode.schedule.sequence import Sequence, branches_of, family_of
from hpcdecode.schedule.stops import Stops


class Feed(Protocol):
    """Where admitted rows come from."""

    def peek(self) -> Prompt | None:
        """The next prompt, or None when there are no more."""

    def pop(self) -> Prompt: ...

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt and record why."""


class Admission:
    """Of one lane. waiting: of the row that was admitted last, not placed yet."""

    def __init__(self, lane: int, feed: Feed, placement: Placement, limits: Limits, stops: Stops):
        self.lane, self.feed, self.placement, self.limits, self.stops = lane, feed, placement, limits, stops
        self.policy = policy_of(limits)
        self.prefixes = Prefixes(placement.block_tokens, limits.prefix_tokens)
        self.waiting: deque[Sequence] = deque()

    def exhausted(self) -> bool:
        """No row left to admit."""
        return not self.waiting and self.feed.peek() is None

    def admit(self, now: int, in_flight: Collection[Sequence], slots: list[int]) -> MicroBatch:
        """The micro-batch that is to be prefilled from step `now` on, placed; it may be empty.

        in_flight: sequences that decode or are prefilled. slots: free ones, of which those that are needed are taken.
        """
        busy = bool(in_flight)
        group = MicroBatch(self.lane, self.placement, self.prefixes, self.limits, self.policy, now, busy)
        room = self.policy.room(now, in_flight)
        while room > 0 and (branches := self._next_branches()) is not None:
            first = branches[0]
            count = len(first.branch)
            fits = count <= room or not (busy or group.sequences)  # an empty lane takes any row
            if not fits or count > len(slots) or not group.admit(first, slots):
                break
            if not self.waiting:
                self.feed.pop()
                self.waiting += branches
            self.waiting.popleft()
            room -= count
        for sequence in group.members:
            self.placement.add(sequence)
            if sequence.prefix:
                sequence.prefix.users += 1
        if group.sequences:
            self.policy.admitted(group.start_step, busy)
        return group

    def _next_branches(self) -> Seq[Sequence] | None:
        """What is to be admitted next: the rest of a row, or the next row that this lane can run, or nothing."""
        while not self.waiting and (prompt := self.feed.peek()) is not None:
            branches = row_branches(prompt, self.lane, self.limits, self.placement, self.stops)
            problem = problem_of(branches, self.limits, self.placement)
            if problem is None:
                return branches
            self.feed.refuse(prompt, problem)
        return self.waiting or None


def row_branches(prompt: Prompt, lane: int, limits: Limits, placement: Placement, stops: Stops) -> list[Sequence]:
    """What is to be prefilled of a row: the sequences from which its samples go on."""
    max_new = prompt.params.max_tokens
    if limits.max_positions is not None:
        max_new = min(max_new, limits.max_positions - len(prompt.token_ids))
    return branches_of(family_of(prompt, max_new, lane, stops), placement.block_tokens)


def problem_of(branches: Seq[Sequence], limits: Limits, placement: Placement) -> str | None:
    """Why a lane can never run a row, if it cannot."""
    most, capacity = max(len(s.branch) for s in branches), placement.largest
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
