"""Which rows enter a lane, and when: its policy decides, within the R-ranks' KV capacity."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import SequenceState, prefilled_sequences, start_request
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.microbatch import MicroBatch
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.policies import policy_of
from hpcdecode.schedule.prefixes import Prefixes
from hpcdecode.schedule.slots import SlotPool


class Feed(Protocol):
    """Where admitted rows come from."""

    def peek(self) -> Prompt | None:
        """The next prompt, or None when there are no more."""

    def pop(self) -> Prompt: ...

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt and record why."""


class Admission:
    """Of one lane. waiting: of the row that was admitted last, not placed yet."""

    def __init__(self, lane: int, feed: Feed, placement: Placement, limits: LaneLimits, stops: Stops):
        self.lane, self.feed, self.placement, self.limits, self.stops = lane, feed, placement, limits, stops
        self.policy = policy_of(limits)
        self.prefixes = Prefixes(placement.block_tokens, limits.prefix_tokens)
        self.waiting: deque[SequenceState] = deque()

    def exhausted(self) -> bool:
        """No row left to admit."""
        return not self.waiting and self.feed.peek() is None

    def admit(self, now: int, in_flight: Collection[SequenceState], slots: SlotPool) -> MicroBatch:
        """The micro-batch that is to be prefilled from step `now` on, placed; it may be empty.

        in_flight: sequences that decode or are prefilled. slots: free ones, of which those that are needed are taken.
        """
        busy = bool(in_flight)
        group = MicroBatch(self.lane, self.placement, self.prefixes, self.limits, self.policy, now, busy)
        room = self.policy.room(now, in_flight)
        while room > 0 and (branches := self._next_branches()) is not None:
            first = branches[0]
            count = len(first.with_forks)
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

    def _next_branches(self) -> Sequence[SequenceState] | None:
        """What is to be admitted next: the rest of a row, or the next row that this lane can run, or nothing."""
        while not self.waiting and (prompt := self.feed.peek()) is not None:
            branches = row_branches(prompt, self.lane, self.limits, self.placement, self.stops)
            problem = problem_of(branches, self.limits, self.placement)
            if problem is None:
                return branches
            self.feed.refuse(prompt, problem)
        return self.waiting or None


def row_branches(
    prompt: Prompt, lane: int, limits: LaneLimits, placement: Placement, stops: Stops
) -> list[SequenceState]:
    """What is to be prefilled of a row: the sequences from which its samples go on."""
    max_new = prompt.params.max_tokens
    if limits.max_positions is not None:
        max_new = min(max_new, limits.max_positions - len(prompt.token_ids))
    return prefilled_sequences(start_request(prompt, max_new, lane, stops), placement.block_tokens)


def problem_of(branches: Sequence[SequenceState], limits: LaneLimits, placement: Placement) -> str | None:
    """Why a lane can never run a row, if it cannot."""
    most, capacity = max(len(s.with_forks) for s in branches), placement.largest
    if most > limits.batch:
        return f"n: expected at most {limits.batch} (the batch of a lane), got {most}; raise batch, or lower n"
    if all(placement.tokens(s.with_forks) <= capacity for s in branches):
        return None
    first = branches[0]
    most_new = first.request.max_new_tokens
    samples = f" for each of {most} samples" if most > 1 else ""
    return (
        f"needs {max(placement.tokens(s.with_forks) for s in branches)} tokens of KV cache "
        f"({len(first.prompt.token_ids)} of the prompt and up to {most_new} new{samples}), but an R-rank "
        f"holds {capacity}: raise kv_memory, or lower max_tokens{' or n' if samples else ''}"
    )
