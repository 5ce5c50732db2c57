"""Load control (FastDecode, Algorithm 1): a sequence starts at the earliest step at which the R-load stays below W_lim.

The load of a step is the tokens that its sequences attend to. It can only peak where a sequence ends, so a sequence is
added (AddMicroBatch) where the load at every end to come, its own included, is at most W_lim. Whether the next row may
start is asked at every step, which finds its earliest step (GetEarliestStep) for any mixture of lengths. After a cold
start, B sequences come in over S steps as with fixed F: if W_lim alone held them, the first would all end together.

Sequences that may stop early are expected to end as those before them did: h = stops / tokens is the chance that a
token is the last, and one that may go on for n tokens is expected to take (1 - (1-h)^n) / h of them. While nothing has
stopped early, that is n, and the load never exceeds W_lim, but for a row that exceeds it alone: it runs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.policies.base import Policy, ramp


class LoadControl(Policy):
    def __init__(self, limits: LaneLimits):
        super().__init__(limits)
        self._began: int | None = None  # the first step since the lane was empty
        self._tokens = self._stops = 0
        self._in_flight = _NOTHING

    def room(self, now: int, in_flight: Collection[SequenceState]) -> int:
        if not in_flight:
            self._began = None
        self._in_flight = self._courses(in_flight, now)
        elapsed = 0 if self._began is None else max(now - self._began, 0)
        return ramp(self.limits, elapsed) - self.held(now, in_flight)

    def allows(self, group: Sequence[SequenceState]) -> bool:
        if not self._in_flight.size and len(group) == len(group[0].with_forks):
            return True
        start = group[0].start_step
        courses = np.concatenate([self._in_flight, self._courses(group, start)], axis=1)
        return peak(courses, start) <= self.limits.load

    def admitted(self, start_step: int, busy: bool) -> None:
        if self._began is None:
            self._began = start_step

    def saw(self, tokens: int, stops: int) -> None:
        self._tokens += tokens
        self._stops += stops

    def _courses(self, sequences: Collection[SequenceState], now: int) -> np.ndarray:
        """First step, expected last step, and the step at which each would have held no token, int64 [3, n]."""
        if not sequences:
            return _NOTHING
        start, end, final = np.array([(s.start_step, s.end_step, s.final_length) for s in sequences]).T
        first = np.maximum(start, now)
        chance = self._stops / max(self._tokens, 1)
        steps = np.maximum(end - first + 1, 0)
        expected = np.ceil((1 - (1 - chance) ** steps) / chance).astype(np.int64) if chance else steps
        return np.stack([start, first + expected - 1, end - final])


def peak(courses: np.ndarray, start: int) -> int:
    """The greatest load from step `start` on. A sequence holds t - origin tokens at step t.

    courses: first step, last step and origin of every sequence, int64 [3, n].
    """
    first, last, origin = courses
    at = np.unique(last[last >= start])
    if not at.size:
        return 0
    return int((_summed(first, origin, at, "right") - _summed(last, origin, at, "left")).max())


def _summed(steps: np.ndarray, origin: np.ndarray, at: np.ndarray, side: str) -> np.ndarray:
    """The tokens held at the steps `at` by the sequences whose step in `steps` is earlier (right: or the same)."""
    order = np.argsort(steps)
    count = np.searchsorted(steps[order], at, side)
    origins = np.concatenate([[0], np.cumsum(origin[order])])
    return count * at - origins[count]


_NOTHING = np.empty((3, 0), np.int64)
