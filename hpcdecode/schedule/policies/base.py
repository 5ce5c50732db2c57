"""What a schedule decides. Whether a sequence's KV cache fits is not its affair: `Placement` sees to that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits


class Policy:
    """Admits what there is room for, at every step. period: steps over which the prompts of a micro-batch are spread
    while the lane decodes."""

    period = 1

    def __init__(self, limits: LaneLimits):
        self.limits = limits

    def room(self, now: int, in_flight: Collection[SequenceState]) -> int:
        """How many sequences the lane may admit at step `now`; asked whenever no prompt is being prefilled.

        in_flight: those that decode, and those that are prefilled.
        """
        return self.limits.batch - self.held(now, in_flight)

    def held(self, now: int, in_flight: Collection[SequenceState]) -> int:
        """Of those in flight, the ones that may be there when what is admitted at step `now` starts."""
        return sum(s.end_step >= now + self.period for s in in_flight)

    def allows(self, group: Sequence[SequenceState]) -> bool:
        """Whether these sequences, all those of a micro-batch, may start at their `start_step`; asked after `room`."""
        return True

    def admitted(self, start_step: int, busy: bool) -> None:
        """Sequences were admitted that start at `start_step`; busy: the lane decodes meanwhile."""

    def saw(self, tokens: int, stops: int) -> None:
        """A step made so many tokens, of which so many ended a sequence before its max_tokens."""


def ramp(limits: LaneLimits, steps: int) -> int:
    """Sequences that may be in flight so many steps after a cold start: M more every F steps, up to B."""
    periods = steps // limits.period + 1
    return min(limits.batch, ceil(limits.batch * limits.period * periods / limits.steps))
