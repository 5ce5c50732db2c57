"""Fixed F (FastDecode, section 4.2): a micro-batch every F steps, so that the load of the R-ranks stays level.

B sequences of S steps each are in flight in the steady state; M = B*F/S of them enter every F steps. The prompts of a
micro-batch are prefilled over the F steps before it starts. Sequences that end early leave headroom for the next one.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.policies.base import Policy


class FixedF(Policy):
    """Admits M sequences every F steps, up to B in flight."""

    by_portions = True

    def __init__(self, limits: LaneLimits):
        super().__init__(limits)
        self.period = limits.period
        self._elapsed = 0  # steps of the ramp
        self._next = 0  # step

    def expect(self, share: float) -> None:
        """Let F shrink with the lengths that are expected, unless it was given."""
        super().expect(share)
        self.period = max(ceil(self.limits.period * share), self.limits.least_period or self.limits.period)

    def headroom(self, now: int, in_flight: Collection[SequenceState]) -> int:
        """Return what is missing to the ramp if F steps have gone by, else 0."""
        if not in_flight:  # what entered an empty lane may have left it before it started
            self._next = min(self._next, now + self.period)
        if now < self._next:
            return 0
        target = self.ramp(self._elapsed, self.period)
        self._elapsed += self.period
        self._next = now + self.period
        return target - self.held(now, in_flight)

    def deferred(self, now: int) -> None:
        """Take this turn again in the next step."""
        if self._next == now + self.period:
            self._elapsed -= self.period
            self._next = now + 1

    def admitted(self, start_step: int, busy: bool) -> None:
        """Begin to count F steps when an empty lane starts."""
        if not busy:
            self._next = start_step
