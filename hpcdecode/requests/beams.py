"""Beam search: the likeliest continuations of a prompt go on side by side.

A hypothesis that ends scores its log-probability over its length to the power of `length_penalty`. The rules are those
of transformers' `generate` with `early_stopping=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple


class Hypothesis(NamedTuple):
    score: float
    logprob: float  # of all its tokens
    token_ids: list[int]


class Move(NamedTuple):
    """A beam goes on from `parent`, one of the beams before, with `token`."""

    parent: int
    token: int
    logprob: float  # of all its tokens


class Beams:
    """The beams of one row. moves: how each goes on from the last step, likeliest first; none when the search is over.

    logprobs: of the beams; of one that has no token yet at first. best: the finished hypotheses, best first, as many as
    there are beams when the search is over.
    """

    def __init__(self, width: int, length_penalty: float, max_new: int, ends: frozenset[int]):
        self.width, self.length_penalty, self.max_new, self.ends = width, length_penalty, max_new, ends
        self.best: list[Hypothesis] = []
        self.moves: list[Move] = []
        self.logprobs = [0.0]
        self._tokens: list[list[int]] = [[]]

    @property
    def candidates(self) -> int:
        """Moves to choose from: so many that `width` of them do not end."""
        return max(2, 1 + len(self.ends)) * self.width

    def advance(self, candidates: Sequence[Move]) -> None:
        """Take a step; candidates: the likeliest moves of all beams, likeliest first."""
        length = len(self._tokens[0]) + 1
        ending = {i for i, move in enumerate(candidates) if length == self.max_new or move.token in self.ends}
        made = [self._hypothesis(candidates[i]) for i in sorted(ending) if i < self.width]
        self.best = nlargest(self.width, [*self.best, *made], key=lambda h: h.score)
        going = [move for i, move in enumerate(candidates) if i not in ending][: self.width]
        self.moves = going if going and self._improves(going[0].logprob, length) else []
        self._tokens = [[*self._tokens[move.parent], move.token] for move in self.moves]
        self.logprobs = [move.logprob for move in self.moves]

    def _hypothesis(self, move: Move) -> Hypothesis:
        tokens = [*self._tokens[move.parent], move.token]
        return Hypothesis(move.logprob / len(tokens) ** self.length_penalty, move.logprob, tokens)

    def _improves(self, logprob: float, length: int) -> bool:
        """Whether the likeliest beam may still be better than a finished hypothesis, as far as its length tells."""
        return len(self.best) < self.width or logprob / length**self.length_penalty > self.best[-1].score
