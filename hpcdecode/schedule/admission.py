"""What a lane takes on: requests become sequences with R-ranks and slots, a micro-batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.requests.start import prefilled_sequences, start_request
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.microbatch import MicroBatch
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.policies import policy_of
from hpcdecode.schedule.prefixes import NOTHING, Beginning, Prefixes
from hpcdecode.schedule.slots import Slots


class Feed(Protocol):
    """Where prompts come from."""

    def peek(self) -> Prompt | None:
        """Return the next prompt, or None if there is none at the moment."""

    def at_hand(self) -> Prompt | None:
        """Return the next prompt if it can be had at once, or None."""

    def exhausted(self) -> bool:
        """Return whether there are no more prompts; false as long as that is not known."""

    def pop(self) -> Prompt:
        """Take the next prompt."""

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt and record why."""


class LaneSource(Protocol):
    """Where the lanes of an S-rank take their prompts; see `Feed` for what the methods do."""

    def peek(self, taker: int) -> Prompt | None:
        """Return the next prompt of a lane."""

    def at_hand(self, taker: int) -> Prompt | None:
        """Return the next prompt of a lane if it can be had at once."""

    def exhausted(self) -> bool:
        """Return whether there are no more prompts."""

    def pop(self, taker: int) -> Prompt:
        """Take the next prompt of a lane."""

    def refuse(self, prompt: Prompt, reason: str, taker: int) -> None:
        """Drop the next prompt of a lane and record why."""


class LaneFeed:
    """Feed of one lane.

    Args:
        source: Of all lanes.
        lane: Its index.
    """

    def __init__(self, source: LaneSource, lane: int):
        self._source, self._lane = source, lane
        self.exhausted = source.exhausted

    def peek(self) -> Prompt | None:
        """Return the next prompt, or None if there is none at the moment."""
        return self._source.peek(self._lane)

    def at_hand(self) -> Prompt | None:
        """Return the next prompt if it can be had at once, or None."""
        return self._source.at_hand(self._lane)

    def pop(self) -> Prompt:
        """Take the next prompt."""
        return self._source.pop(self._lane)

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt and record why."""
        self._source.refuse(prompt, reason, self._lane)


class Admission:
    """What one lane admits.

    Args:
        lane: index of the lane.
        feed: of the lane.
        placement: of the S-rank.
        limits: of the lane.
        stops: what ends a sequence.

    Attributes:
        waiting: sequences to place before those of new requests: of the request that was admitted last, and
            those that gave up their room. Others fork from them. The oldest come first.
    """

    def __init__(self, lane: int, feed: Feed, placement: Placement, limits: LaneLimits, stops: Stops):
        self.lane, self.feed, self.placement, self.limits, self.stops = lane, feed, placement, limits, stops
        self.policy = policy_of(limits)
        self.prefixes = Prefixes(placement.block_tokens, limits.prefix_tokens, limits.prefixes)
        self.waiting: deque[SequenceState] = deque()

    def exhausted(self) -> bool:
        """Return whether nothing is left to admit."""
        return not self.waiting and self.feed.exhausted()

    def admit(self, now: int, in_flight: Collection[SequenceState], slots: Slots) -> MicroBatch:
        """Return the micro-batch that is to be prefilled from step `now` on, placed; it may be empty.

        Args:
            now: lane step.
            in_flight: sequences that decode or are prefilled.
            slots: of the lane, of which those that are needed are taken.
        """
        busy = bool(in_flight)
        group = MicroBatch(self.placement, self.prefixes, self.limits, self.policy, now, busy)
        if self.prefixes.crowded:
            group.dropped += self.prefixes.make_room(self._following())
        self.policy.expect(self.placement.expected_share(self.limits.steps + 1))
        headroom = self.policy.headroom(now, in_flight)
        while headroom > 0 and (sequences := self._next_sequences()) is not None:
            first = sequences[0]
            if not self.placement.may_enter(first):
                break
            count = len(first.with_forks)
            fits = count <= headroom or not (busy or group.sequences)  # an empty lane takes any request
            if not fits or count > len(slots) or not group.admit(first, slots):
                break
            if not self.waiting:
                self.feed.pop()
                self.waiting += sequences
            self.waiting.popleft()
            headroom -= count
        if group.sequences:
            group.share_with(self._beginning_of(self.feed.at_hand()), slots)
        for sequence in group.members:
            self.placement.add(sequence)
            if sequence.prefix:
                sequence.prefix.users += 1
                sequence.prefix.last_used = now
        if group.lacks_room:
            self.placement.lacking.add(self.lane)
        elif group.sequences:
            self.placement.lacking.discard(self.lane)
        if group.sequences:
            self.policy.admitted(group.start_step, busy)
        if not self.limits.keeps_prefixes or self.placement.lacking:
            group.dropped += self.prefixes.drop_unused()
        return group

    def _following(self) -> Beginning:
        """Return what the next sequence to place may share."""
        return self._beginning_of(None if self.waiting else self.feed.peek())

    def _beginning_of(self, prompt: Prompt | None) -> Beginning:
        """Return what the next sequence to place may share, of this prompt if none waits."""
        if self.waiting:
            return Beginning(self.waiting[0].shareable_ids, self.waiting[0].adapter)
        if prompt is None:
            return NOTHING
        return Beginning(prompt.targets[0].input_ids if prompt.targets else prompt.token_ids, prompt.adapter)

    def put_back(self, sequences: Sequence[SequenceState]) -> None:
        """Have sequences wait that gave up their room."""
        self.waiting = deque(sorted((*self.waiting, *sequences), key=lambda s: s.seniority))
        self.placement.await_room(sequences)

    def _next_sequences(self) -> Sequence[SequenceState] | None:
        """Return the rest of a request, or the next request that this lane can run, or None."""
        while not self.waiting and (prompt := self.feed.peek()) is not None:
            sequences = sequences_of(prompt, self.lane, self.limits, self.placement, self.stops)
            problem = problem_of(sequences, self.limits, self.placement)
            if problem is None:
                return sequences
            self.feed.refuse(prompt, problem)
        return self.waiting or None


def sequences_of(
    prompt: Prompt, lane: int, limits: LaneLimits, placement: Placement, stops: Stops
) -> list[SequenceState]:
    """Return the sequences of a prompt that are to be prefilled, from which its others fork."""
    max_new = 1 if prompt.targets else prompt.params.max_tokens
    if not prompt.targets and limits.max_positions is not None:
        max_new = min(max_new, limits.max_positions - len(prompt.token_ids))
    return prefilled_sequences(start_request(prompt, max_new, lane, stops), placement.block_tokens)


def problem_of(sequences: Sequence[SequenceState], limits: LaneLimits, placement: Placement) -> str | None:
    """Return why a lane can never run a request, or None."""
    most, capacity = max(len(s.with_forks) for s in sequences), placement.largest
    if most > limits.most:
        return f"n: expected at most {limits.most} (the batch of a lane), got {most}; raise batch, or lower n"
    if all(placement.tokens(s.with_forks) <= capacity for s in sequences):
        return None
    expected = f"KV cache of an R-rank: expected at most {capacity} tokens, got"
    if sequences[0].target is not None:
        needs = max(len(s.given_ids) for s in sequences)
        return f"{expected} {needs}; raise kv_memory, or score less text"
    first = sequences[0]
    most_new = first.request.max_new_tokens
    samples = f" for each of {most} samples" if most > 1 else ""
    left = ", less what leaves windows" if placement.footprint.windows else ""
    return (
        f"{expected} {max(placement.tokens(s.with_forks) for s in sequences)} "
        f"({len(first.prompt.token_ids)} of the prompt and up to {most_new} new{samples}{left}); "
        f"raise kv_memory, or lower max_tokens{' or n' if samples else ''}"
    )
