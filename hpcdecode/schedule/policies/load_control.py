"""Load control (FastDecode, Algorithm 1): a sequence starts at the earliest step at which the load stays below W_lim.

The load of a step is the tokens that its sequences attend to. It can only peak at a step in which a sequence ends. So a
sequence is added (AddMicroBatch) if the load at every end to come, its own included, is at most W_lim. Whether the next
one may start is asked at every step, which finds its earliest step (GetEarliestStep) for any mixture of lengths. After
a cold start, B sequences come in over S steps as with fixed F; under W_lim alone the first would all end together.

Sequences that may stop early are expected to end as those before them did. h = stops / tokens is the chance that a
token is the last. A sequence that may go on for n tokens is expected to take (1 - (1-h)^n) / h of them, or n while
nothing has stopped early. The load never exceeds W_lim then, but for a sequence that exceeds it alone: it runs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.policies.base import Policy

Steps = NDArray[np.int64]


class LoadControl(Policy):
    """Admits sequences while the load at every end to come is at most W_lim."""

    by_portions = True

    def __init__(self, limits: LaneLimits):
        super().__init__(limits)
        self._began: int | None = None  # the first step since the lane was empty
        self._tokens = self._stops = 0
        self._in_flight = _NOTHING

    def headroom(self, now: int, in_flight: Collection[SequenceState]) -> int:
        """Return what is missing to the ramp since the lane was empty."""
        if not in_flight:
            self._began = None
        self._in_flight = self._trajectories(in_flight, now)
        elapsed = 0 if self._began is None else max(now - self._began, 0)
        return self.ramp(elapsed, self.limits.period) - self.held(now, in_flight)

    def allows(self, group: Sequence[SequenceState]) -> bool:
        """Return whether the peak of the load stays within W_lim, or the lane runs this request alone."""
        if not self._in_flight.size and len(group) == len(group[0].with_forks):
            return True
        start = group[0].start_step
        trajectories = np.concatenate([self._in_flight, self._trajectories(group, start)], axis=1)
        return peak(trajectories, start) <= self.limits.load

    def admitted(self, start_step: int, busy: bool) -> None:
        """Begin the ramp with the first sequences of an empty lane."""
        if self._began is None:
            self._began = start_step

    def observe(self, tokens: int, stops: int) -> None:
        """Count tokens and early stops."""
        self._tokens += tokens
        self._stops += stops

    def _trajectories(self, sequences: Collection[SequenceState], now: int) -> Steps:
        """Return first step, expected last step, and the step of no token of each sequence, int64 [3, n]."""
        if not sequences:
            return _NOTHING
        start, end, final = np.array([(s.start_step, s.end_step, s.final_length) for s in sequences]).T
        first = np.maximum(start, now)
        chance = self._stops / max(self._tokens, 1)
        steps = np.maximum(end - first + 1, 0)
        expected = np.ceil((1 - (1 - chance) ** steps) / chance).astype(np.int64) if chance else steps
        return np.stack([start, first + expected - 1, end - final])


def peak(trajectories: Steps, start: int) -> int:
    """Return the greatest load from step `start` on, tokens. A sequence holds t - origin tokens at step t.

    Args:
        trajectories: first step, last step and origin of every sequence, int64 [3, n].
        start: lane step.
    """
    first, last, origin = trajectories
    at = np.unique(last[last >= start])
    if not at.size:
        return 0
    return int((_summed(first, origin, at, "right") - _summed(last, origin, at, "left")).max())


def _summed(steps: Steps, origin: Steps, at: Steps, side: Literal["left", "right"]) -> Steps:
    """Return the tokens held at the steps `at` by the sequences whose step in `steps` is earlier (right: or equal)."""
    order = np.argsort(steps)
    count = np.searchsorted(steps[order], at, side)
    origins = np.concatenate([np.zeros(1, np.int64), np.cumsum(origin[order])])
    held: Steps = count * at - origins[count]
    return held


_NOTHING: Steps = np.empty((3, 0), np.int64)
