"""Drafts by a second model: for which sequences, and how many tokens, are worth what the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.draft_chances import DraftChances
from hpcdecode.schedule.draft_price import DraftPrice

if TYPE_CHECKING:
    from torch import Tensor

_MARGIN = 1.1  # times what drafts take that they must save
_FADING = 1 / 32  # weight of the newest step in the mean seconds of a token
_EARLY = 0.5  # of the tokens that a sequence may still have, those that it is expected to have
_LEARNT = 8  # drafts from which on their chances are known
_TRIED = 6  # tokens of a draft before that
FEW = 8  # tokens that a draft reads beside; what has more is read before
_TRIAL_SECONDS, _TRIAL_SHARE = 0.25, 0.02  # of reading that is spent to find out: at first, and of all time


class AskedDraft(NamedTuple):
    """A sequence that is to have a draft of at most so many tokens, as far as its grammar allows them.

    The draft begins with those that the grammar forces.
    """

    sequence: SequenceState
    tokens: int
    forced: list[int]


class DraftSeconds(NamedTuple):
    """What drafts took.

    Attributes:
        passes: Sequences and seconds of each pass of the model.
        tokens: That it read before, of sequences that it had not followed.
        reading: Seconds of that.
    """

    passes: list[tuple[int, float]]
    tokens: int = 0
    reading: float = 0.0


class _Best(NamedTuple):
    """The best number of tokens for some sequences; the seconds that each of their tokens saves, and each sequence."""

    tokens: int = 0
    of_token: float = 0.0
    of_sequence: float = 0.0


class Continuation(Protocol):
    """A second model, which goes on with sequences where they are."""

    def take_hidden(self, sequence: SequenceState, rows: Tensor, end: int) -> None:
        """Take the hidden states [n, hidden] with which a sequence's tokens before the place `end` are read, if any."""

    def continued(self, asked: Sequence[AskedDraft]) -> list[list[int]]:
        """Return a draft of each, or no tokens."""

    def unread(self, sequence: SequenceState) -> int | None:
        """Return how many tokens it has to read before it can go on with a sequence; None if it cannot."""

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is held of a sequence, if there is anything."""

    def forget_all(self) -> None:
        """Drop what is held of all sequences."""

    def take_seconds(self) -> DraftSeconds:
        """Return what drafts took since the last call."""


class ModelDrafts:
    """Decides what a second model guesses: as many tokens a sequence as save the most time.

    A step of n rows takes T(n) seconds, a pass of the model over m sequences d(m), a token c on average over the last
    steps, what is looked up included. k tokens for each of m sequences, of which the first j are right with the chance
    P(j), take T(n + m k) - T(n) + k d(m) and save m (P(1) + ... + P(k)) c. In the steady state that gives the most
    tokens a second (the goodput of Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large Language Models
    Using Goodput", by Dinkelbach's iteration). A sequence is read if the tokens that it may still have save as much.

    Args:
        model: The second model.
        most: Tokens of a draft.

    Attributes:
        model: The same.
        price: Of rows of a step, without what drafts take.
    """

    def __init__(self, model: Continuation, most: int):
        self.model, self.price, self._most = model, DraftPrice(), most
        self._chances, self._pass, self._read = DraftChances(), DraftPrice(), DraftPrice()
        self._drafted: dict[int, tuple[int, int]] = {}  # tokens forced and guessed, by the sequence's key
        self._elapsed = self._trials = 0.0
        self._seconds = self._tokens = 0.0  # sums that fade

    def choose(self, sequences: Sequence[SequenceState], rows: int, left: int) -> list[tuple[SequenceState, int]]:
        """Return sequences that are to have drafts, and how many tokens.

        Args:
            sequences: Those that have no other drafts.
            rows: Of the step so far.
            left: Rows that it may have beside those.
        """
        if not sequences or not left:
            return []
        if not self._learnt:
            return self._tried(sequences, rows, left)
        best = self._best(rows, len(sequences), left)
        if not best.tokens:
            return []
        worth = [s for s in sequences if self._reading(s) <= best.of_token * _EARLY * tokens_left(s)]
        depth = self._best(rows, len(worth), left).tokens if worth else 0
        return [(s, depth) for s in worth[: left // depth]] if depth else []

    def saves_more(self, sequences: Sequence[SequenceState], rows: int, left: int) -> list[SequenceState]:
        """Return sequences for which a draft of the model is expected to save more than the one that they have.

        Args:
            sequences: Those that have drafts by lookups.
            rows: Of the step so far.
            left: Rows that it may have beside those.
        """
        if not self._learnt or self.price.row_seconds is None or not sequences:
            return []
        saved = self._best(rows, len(sequences), left).of_sequence
        if not saved:
            return []
        worth, row = self._worth, self.price.row_seconds

        def kept(sequence: SequenceState) -> float:
            tokens, history = sequence.draft.tokens, sequence.draft.history
            return (history.expected if history else 0.0) * worth - _MARGIN * row * len(tokens)

        less = (s for s in sequences if s.sampler.matcher is None and kept(s) < saved)
        return [s for s in less if self._unread(s) <= FEW]

    def note(self, asked: AskedDraft, tokens: int) -> None:
        """Take note that a sequence has a draft of so many tokens in the next step; one that was refused is wrong."""
        refused = asked.sequence.sampler.matcher is not None and 0 < tokens < asked.tokens
        forced = min(len(asked.forced), tokens)
        self._drafted[asked.sequence.key] = forced, tokens + refused - forced

    def settle(self, sequence: SequenceState, right: int | None) -> None:
        """Take note of how many tokens of a sequence's draft were right, None if it was not tried, and of its end."""
        forced, guessed = self._drafted.pop(sequence.key, (0, 0))
        if guessed and right is not None and right >= forced:
            self._chances.learn(guessed, right - forced)
        if sequence.finish_reason is not None:
            self.model.forget(sequence)

    def observe(self, seconds: float, rows: int, tokens: int) -> None:
        """Take note of a step without prompts, drafts included, that had so many rows and gave so many tokens."""
        spent = self.model.take_seconds()
        for count, took in spent.passes:
            self._pass.observe(took, count, count)
        if spent.tokens:
            self._read.observe(spent.reading, spent.tokens, spent.tokens)
        self._elapsed += seconds
        seconds -= spent.reading
        self._seconds = (1 - _FADING) * self._seconds + seconds
        self._tokens = (1 - _FADING) * self._tokens + tokens
        self.price.observe(max(seconds - sum(took for _, took in spent.passes), 0.0), rows, tokens)

    def _tried(self, sequences: Sequence[SequenceState], rows: int, left: int) -> list[tuple[SequenceState, int]]:
        """Return a sequence that is tried to find out how often guesses are right, and what they take.

        There is none in every other step, to compare with, and none if guesses were not worth it if all were right.
        """
        known = self.price.row_seconds is not None and self._chances.drafts > 0
        if self.price.steps % 2 or (known and not self._best(rows, len(sequences), left, sure=True).tokens):
            return []
        one = min(sequences, key=self._unread)
        expected = self._reading(one)
        if expected > self._best(rows, len(sequences), left).of_token * _EARLY * tokens_left(one):
            if self._trials + expected > _TRIAL_SECONDS + _TRIAL_SHARE * self._elapsed:
                return []
            self._trials += expected
        return [(one, min(_TRIED, left, self._most))]

    def _reading(self, sequence: SequenceState) -> float:
        """Return the seconds that it takes to read a sequence before a draft."""
        tokens = self.model.unread(sequence)
        if tokens is None:
            return inf
        return 0.0 if tokens <= FEW else self._read.step_seconds(tokens)

    def _unread(self, sequence: SequenceState) -> float:
        """Return how many tokens are to be read of a sequence, without bound if the model cannot go on with it."""
        tokens = self.model.unread(sequence)
        return inf if tokens is None else tokens

    @property
    def _learnt(self) -> bool:
        """Whether it is known how often drafts are right and what they take, in other steps than those to find out."""
        return self._chances.drafts >= _LEARNT and self.price.row_seconds is not None and not self.price.probes

    @property
    def _worth(self) -> float:
        """Seconds that a token takes on average."""
        return self._seconds / max(self._tokens, 1.0)

    def _best(self, rows: int, sequences: int, left: int, *, sure: bool = False) -> _Best:
        """Return what is best for so many sequences, if guesses are right as often as they were, or `sure` to be."""
        alone, worth, best, most, chance, right = self.price.step_seconds(rows), self._worth, _Best(), 0.0, 1.0, 0.0
        for k in range(1, min(self._most, left) + 1):
            own = min(sequences, left // k)
            chance *= 1.0 if sure else self._chances.of(k - 1)
            right += chance
            cost = self.price.step_seconds(rows + own * k) - alone + k * self._pass.step_seconds(own)
            if (gain := own * right * worth - _MARGIN * cost) > most:
                best, most = _Best(k, gain / (own * (1 + right)), gain / own), gain
        return best


def tokens_left(sequence: SequenceState) -> int:
    """Return how many tokens a sequence may have beyond its next one."""
    return sequence.request.max_new_tokens - len(sequence.generated) - 1
