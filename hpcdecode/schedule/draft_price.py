"""What one more row costs a step, by the steps so far: whether a guess is worth a row of the next one."""

from __future__ import annotations

_WEIGHT = 1 / 32  # of the newest step in the means, once there are as many
_FIRST = 1  # steps that do not count: they take memory, and build what they need
_SPREAD = 0.02  # of the rows of steps, as a share of their mean, from which on the cost of a row can be told
_LONGEST = 4.0  # times the mean time that a step counts as at most; others share the machine
_TRIED, _LEAST_TRIED = 8, 8  # rows that are tried to find out what they cost: one for so many sequences, and so many
PROBE_STEPS = 64  # every so many steps some guesses are free, so that the cost of a row is known as it changes


class DraftPrice:
    """The cost of a row of a step, in units of what a token has cost on average.

    The seconds of steps are fitted by a line over their rows, with weights that fade. Where steps take as long as
    reading weights and KV caches takes, rows are free; where GEMMs are bound by arithmetic, they cost as much as a
    token does.

    Attributes:
        steps: That were observed.
        row_seconds: Seconds of one more row; None while they are to be found out.
    """

    def __init__(self) -> None:
        self._rows = self._seconds = self._tokens = 0.0  # means
        self._variance = self._covariance = 0.0  # of rows; of rows and seconds
        self.row_seconds: float | None = None
        self.steps = 0

    def observe(self, seconds: float, rows: int, tokens: int) -> None:
        """Take note of a step without prompts, that had so many rows and gave so many tokens."""
        self.steps += 1
        count = self.steps - _FIRST
        if count < 1:
            return
        if count > 1:
            seconds = min(seconds, _LONGEST * self._seconds)
        more, longer, weight = rows - self._rows, seconds - self._seconds, max(1 / count, _WEIGHT)
        self._rows += weight * more
        self._seconds += weight * longer
        self._tokens += weight * (tokens - self._tokens)
        self._variance = (1 - weight) * (self._variance + weight * more * more)
        self._covariance = (1 - weight) * (self._covariance + weight * more * longer)
        if self._variance > (_SPREAD * self._rows) ** 2:
            self.row_seconds = max(self._covariance / self._variance, 0.0)

    def tried_rows(self, sequences: int) -> int:
        """Return how many guesses a step has to find out what rows cost: none in every other one, to compare with."""
        return (sequences // _TRIED + _LEAST_TRIED) * (self.steps % 2 == 0)

    @property
    def probes(self) -> bool:
        """Return whether the next step is one in which what is known is tried again."""
        return self.steps % PROBE_STEPS == 0

    @property
    def value(self) -> float | None:
        """Return the cost of a row; None while it is to be found out, as it is for a step now and then."""
        if self.probes or self.row_seconds is None:
            return None
        return self.row_seconds * self._tokens / self._seconds

    def step_seconds(self, rows: int) -> float:
        """Return the seconds of a step of so many rows, as far as is known; 0 before anything is."""
        return max(self._seconds + (self.row_seconds or 0.0) * (rows - self._rows), self._seconds / 8)
