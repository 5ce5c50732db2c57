"""Beam search: the likeliest continuations of a prompt go on side by side.

A hypothesis that ends scores its log-probability over its length to the power of `length_penalty`. The rules are those
of transformers' `generate` with `early_stopping=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from math import inf
from typing import NamedTuple


class Hypothesis(NamedTuple):
    """A continuation that has ended; logprob: of all its tokens."""

    score: float
    logprob: float
    token_ids: list[int]


class Move(NamedTuple):
    """A beam that goes on from `parent`, one of the beams before, with `token`; logprob: of all its tokens."""

    parent: int
    token: int
    logprob: float


class Beams:
    """The beam search of one request.

    Args:
        width: number of beams.
        length_penalty: exponent of the length in the score.
        max_new: tokens of a hypothesis at most.
        ends: tokens that end one.

    Attributes:
        moves: how each beam goes on from the last step, likeliest first; none once the search is over. Where too few
            tokens end nothing, the last ones have no chance, and become no hypothesis.
        logprobs: of the beams; at first of one that has no token.
        best: the finished hypotheses, best first; as many as there are beams once the search is over.
    """

    def __init__(self, width: int, length_penalty: float, max_new: int, ends: frozenset[int]):
        self.width, self.length_penalty, self.max_new, self.ends = width, length_penalty, max_new, ends
        self.best: list[Hypothesis] = []
        self.moves: list[Move] = []
        self.logprobs = [0.0]
        self._tokens: list[list[int]] = [[]]

    @property
    def candidates(self) -> int:
        """Return how many moves to choose from, so many that `width` of them do not end."""
        return max(2, 1 + len(self.ends)) * self.width

    def advance(self, candidates: Sequence[Move]) -> None:
        """Take a step, given the likeliest moves of all beams, likeliest first."""
        length = len(self._tokens[0]) + 1
        ending = {i for i, move in enumerate(candidates) if length == self.max_new or move.token in self.ends}
        made = [self._hypothesis(candidates[i]) for i in sorted(ending) if i < self.width]
        self.best = nlargest(self.width, [*self.best, *made], key=lambda h: h.score)
        going = [move for i, move in enumerate(candidates) if i not in ending][: self.width]
        going += [move._replace(logprob=-inf) for move in going[:1] * (self.width - len(going))]
        self.moves = going if going and self._improves(going[0].logprob, length) else []
        self._tokens = [[*self._tokens[move.parent], move.token] for move in self.moves]
        self.logprobs = [move.logprob for move in self.moves]

    def _hypothesis(self, move: Move) -> Hypothesis:
        tokens = [*self._tokens[move.parent], move.token]
        return Hypothesis(move.logprob / len(tokens) ** self.length_penalty, move.logprob, tokens)

    def _improves(self, logprob: float, length: int) -> bool:
        """Return whether the likeliest beam may still beat a finished hypothesis, as far as its length tells."""
        return len(self.best) < self.width or logprob / length**self.length_penalty > self.best[-1].score
