"""Rows of a simulated job, as lanes take them."""

from __future__ import annotations

import numpy as np

from hpcdecode.planning.lengths import Lengths
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt


class SimulatedFeed:
    """Feed of the lanes of a world: rows that have arrived.

    Args:
        lengths: The workload.
        stop_token_ids: Of all rows.

    Attributes:
        clock: Seconds; set it before lanes look for rows.
        refused: Rows that no lane can run.
    """

    def __init__(self, lengths: Lengths, stop_token_ids: tuple[int, ...] = ()):
        self.lengths, self.clock, self.refused = lengths, 0.0, 0
        self._at = 0
        self._ids: list[int] = []  # of the row before
        self._params = {
            n: SamplingParams(max_tokens=n, ignore_eos=True, stop_token_ids=stop_token_ids)
            for n in np.unique(lengths.most).tolist()
        }
        self._next = self._prompt()

    @property
    def next_arrival(self) -> float | None:
        """Return when the next row arrives or has arrived, in seconds, or None if there are no more."""
        return None if self._next is None else float(self.lengths.arrival[self._at])

    def peek(self) -> Prompt | None:
        """Return the next row that has arrived, or None."""
        return self._next if self._next and self.lengths.arrival[self._at] <= self.clock else None

    def at_hand(self) -> Prompt | None:
        """Return what `peek` does: nothing waits here."""
        return self.peek()

    def exhausted(self) -> bool:
        """Return whether no row is there."""
        return self.peek() is None

    def pop(self) -> Prompt:
        """Take the next row."""
        prompt = self._next
        assert prompt is not None, "pop: expected a row, got none"
        self._at += 1
        self._next = self._prompt()
        return prompt

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Count the next row as refused."""
        self.pop()
        self.refused += 1

    def _prompt(self) -> Prompt | None:
        if self._at == len(self.lengths):
            return None
        return Prompt(self._at, "", self._next_ids(), self._params[int(self.lengths.most[self._at])])

    def _next_ids(self) -> list[int]:
        """Return token ids, of which only their number matters, and what rows begin with alike."""
        count = int(self.lengths.prompt[self._at])
        if self.lengths.shared is None:
            return [0] * count
        begun = self._ids[: min(int(self.lengths.shared[self._at]), count)]
        self._ids = begun + [1 + self._at] * (count - len(begun))
        return self._ids
