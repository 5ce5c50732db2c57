"""What a schedule decides. Whether a sequence's KV cache fits is not its affair: `Placement` sees to that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits


class Policy:
    """Admits what there is headroom for, at every step.

    Attributes:
        period: steps over which the prompts of a micro-batch are spread while the lane decodes.
        by_portions: whether an empty lane takes a micro-batch at first, not all that it has room for.
        batch: B at the moment.
        steps: S, steps in which a sequence is expected to decode.
        prefill_tokens: the most prompt tokens of a step while the lane decodes.
    """

    period = 1
    by_portions = False

    def __init__(self, limits: LaneLimits):
        self.limits = limits
        self.batch, self.steps = limits.batch, limits.steps
        self.prefill_tokens = limits.prefill_tokens

    def expect(self, share: float) -> None:
        """Take note that sequences are expected to take this share of their max_tokens; asked before `headroom`."""
        self.batch = min(ceil(self.limits.batch / share), self.limits.most)
        self.steps = max(ceil(self.limits.steps * share), 1)

    def headroom(self, now: int, in_flight: Collection[SequenceState]) -> int:
        """Return how many sequences the lane may admit at step `now`; asked if no prompt is being prefilled.

        Args:
            now: lane step.
            in_flight: sequences that decode, and those that are prefilled.
        """
        return self.batch - self.held(now, in_flight)

    def held(self, now: int, in_flight: Collection[SequenceState]) -> int:
        """Return how many of those in flight may still be there when what is admitted at step `now` starts."""
        return sum(s.end_step >= now + self.period for s in in_flight)

    def allows(self, group: Sequence[SequenceState]) -> bool:
        """Return whether a micro-batch of these sequences may start at their `start_step`; asked after `headroom`."""
        return True

    def admitted(self, start_step: int, busy: bool) -> None:
        """Take note that sequences were admitted that start at `start_step`; busy: the lane decodes meanwhile."""

    def deferred(self, now: int) -> None:
        """Take note that what had headroom at step `now` found no room, which is made for the next step."""

    def observe(self, tokens: int, stops: int) -> None:
        """Take note that a step made so many tokens, of which so many ended a sequence before its max_tokens."""

    def ramp(self, steps: int, period: int) -> int:
        """Return the sequences that may be in flight so many steps after a cold start: M more every F steps, to B."""
        return min(self.batch, ceil(self.batch * period * (steps // period + 1) / self.steps))
