"""The largest gap between two tokens of each row, from the steps in which it decodes (FluidInfer's latency bound)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class DecodedSteps(NamedTuple):
    """Steps in which a row got its tokens, one after the other.

    Attributes:
        row: Index of the row.
        prefilled: Step with which its prompt, and what it had generated before, was complete: a token came.
        start: Step in which it decodes first.
        steps: In how many it decoded.
        ended: Whether it has its last token; else it gave up its room.
    """

    row: int
    prefilled: int
    start: int
    steps: int
    ended: bool


class LargestGaps:
    """Gaps of the rows of one pool of ranks, which gives each row in flight a token a step.

    Args:
        largest: Of every row so far, float64 [rows], NaN if it has none; it is written to.
    """

    def __init__(self, largest: NDArray[np.float64]):
        self._largest = largest
        self._ends: list[float] = []  # of every step
        self._steps: list[int] = []  # those that no later step is longer than, ascending
        self._seconds: list[float] = []  # of these, since the end of the step before, descending
        self._last: dict[int, float] = {}  # by row that gave up its room, when its latest token came

    def step(self, end: float, decoded: Iterable[DecodedSteps]) -> None:
        """Note a step that ends at `end`, and rows that ended with it, or gave up their room before it began."""
        decoded, now = tuple(decoded), len(self._ends)
        for each in decoded:
            if not each.ended:
                self._note(each)
        seconds = end - self._ends[-1] if self._ends else end
        self._ends.append(end)
        while self._seconds and self._seconds[-1] <= seconds:
            self._seconds.pop()
            self._steps.pop()
        self._steps.append(now)
        self._seconds.append(seconds)
        for each in decoded:
            if each.ended:
                self._note(each)

    def _note(self, each: DecodedSteps) -> None:
        """Count the gaps of a row whose latest token came with the latest step, or with its prompt."""
        row, ends = each.row, self._ends
        token = ends[max(min(each.prefilled, each.start - 1, len(ends) - 1), 0)]  # with its prompt
        gaps = [token - self._last.pop(row)] if row in self._last else []
        if each.steps:
            gaps.append(ends[each.start] - token)
            token = ends[-1]
        if each.steps > 1:
            gaps.append(self._seconds[bisect_right(self._steps, each.start)])
        if not each.ended:
            self._last[row] = token
        if gaps:
            self._largest[row] = np.fmax(self._largest[row], max(gaps))
