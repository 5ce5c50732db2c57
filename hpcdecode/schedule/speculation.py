"""Speculative decoding: sequences get drafts of the tokens that may follow, which their next step confirms or not.

A step takes the newest token of a sequence and its draft as rows. Each row's logits are those that decoding one by one
would have, and so is the token that is drawn from them, as draws depend on (seed, row, sample, position) alone. As long
as it is the token of the draft, the logits of the next row count, too. What a sequence generates stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcdecode._ops_cpu import Drafter, TokenHistory
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.requests.shortcuts import Shortcuts
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.schedule.draft_price import DraftPrice
from hpcdecode.schedule.model_drafts import AskedDraft, ModelDrafts, tokens_left
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import MOST_DRAFTED_ROWS

if TYPE_CHECKING:
    from torch import Tensor

_MARGIN = 1.25  # by which a guess must be worth more than its row: rows are dealt with one by one in Python, too


class SettledDraft(NamedTuple):
    """A draft of so many tokens, of which the first ones were right."""

    sequence: SequenceState
    tokens: int
    right: int


class Speculation:
    """Drafts of the sequences of an S-rank's lanes.

    Args:
        config: How tokens are guessed; None guesses nothing.
        placement: Of the S-rank, which must have room for rows that come earlier than expected.
        drafter: What is known of jobs before, as `drafter_of` makes it; None for nothing.
        model: A second model, which guesses where nothing is looked up; None if there is none.

    Attributes:
        price: What rows cost.
        drafted: Tokens that were guessed.
        confirmed: Those of them that were right.
    """

    def __init__(
        self,
        config: SpeculativeConfig | None,
        placement: Placement,
        drafter: Drafter | None = None,
        model: ModelDrafts | None = None,
    ):
        self.config, self.placement, self._model = config, placement, model
        self.price = DraftPrice() if model is None else model.price
        self.drafted = self.confirmed = 0
        self._drafter = drafter or drafter_of(config)
        self._settled: dict[int, list[SettledDraft]] = {}  # by lane

    def draft(self, sequences: Sequence[SequenceState]) -> None:
        """Give drafts to sequences that decode in the next step, as far as they are worth their rows."""
        if self.config is None:
            return
        able = [s for s in sequences if s.beams is None]
        left = self._look_up(self.config, able)
        if self._model is not None:
            rows = len(sequences) + MOST_DRAFTED_ROWS - left
            for sequence in self._model.saves_more([s for s in able if s.draft.tokens], rows, left):
                rows, left = rows - len(sequence.draft.tokens), left + len(sequence.draft.tokens)
                sequence.draft.tokens = []
            self._go_on(self._model, [s for s in able if not s.draft.tokens and tokens_left(s) > 0], rows, left)
        ahead: dict[int, list[SequenceState]] = {}
        for sequence in able:
            if sequence.draft.tokens:
                ahead.setdefault(sequence.rank, []).append(sequence)
        for rank, drafting in ahead.items():
            if not self.placement.try_ahead(rank, drafting, [len(s.draft.tokens) for s in drafting]):
                for sequence in drafting:
                    sequence.draft.tokens = []

    def take_unconfirmed(self, lane: int) -> list[tuple[int, int, int]]:
        """Return (R-rank, slot, length) of the slots that the lane's next plan must shorten, before anything else.

        Until then other lanes have no use of their room.
        """
        found = self._settled.pop(lane, [])
        for sequence, _, right in found:
            self.placement.advance(sequence, right)
        return [(s.rank, s.slot, s.length) for s, tokens, right in found if right < tokens]

    def settle(self, sequences: Iterable[SequenceState]) -> None:
        """Take note of what became of the drafts of a step, and of what KV caches hold of tokens that were wrong."""
        for sequence in sequences if self.config else ():
            draft = sequence.draft
            count, right = len(draft.tokens), sequence.length - draft.length - 1
            if self._model is not None:
                self._model.settle(sequence, right if count else None)
            if not count:
                continue
            self.drafted += count
            self.confirmed += right
            sequence.request.shortcuts += Shortcuts(drafted_tokens=count, confirmed_tokens=right)
            draft.tokens = []
            if sequence.finish_reason is None:
                self._settled.setdefault(sequence.lane, []).append(SettledDraft(sequence, count, right))

    def take_hidden(self, sequences: Sequence[SequenceState], rows: Sequence[int], hidden: Tensor) -> None:
        """Hand a second model the hidden states with which it reads the tokens that a step gave, before `settle`.

        Args:
            sequences: That have got tokens, and have not settled.
            rows: Place of the first hidden state of each.
            hidden: Hidden states that the step's logits are of, [n, hidden].
        """
        if self._model is None:
            return
        for sequence, row in zip(sequences, rows, strict=True):
            if sequence.finish_reason is not None:
                self._model.model.forget(sequence)  # it may have ended with its prompt
            elif sequence.beams is None:
                right = sequence.length - sequence.draft.length - 1 if sequence.draft.tokens else 0
                end = len(sequence.given_ids) + len(sequence.generated)
                self._model.model.take_hidden(sequence, hidden[row : row + 1 + right], end)

    def take_prompt_states(self, sequences: Sequence[SequenceState], rows: Tensor, end: int) -> None:
        """Hand a second model hidden states of a prompt, [n, hidden], of the tokens before the place `end`."""
        if self._model is None:
            return
        for sequence in sequences:
            if sequence.finish_reason is None and sequence.beams is None:
                self._model.model.take_hidden(sequence, rows, end + 1)

    def observe(self, seconds: float, rows: int, tokens: int) -> None:
        """Take note of a step without prompts, as `DraftPrice.observe`."""
        (self._model or self.price).observe(seconds, rows, tokens)

    def _look_up(self, config: SpeculativeConfig, sequences: Sequence[SequenceState]) -> int:
        """Give drafts by what other tokens were followed by; return how many more rows the step may have."""
        price, left = self.price.value, MOST_DRAFTED_ROWS
        if price is None:
            price, left = 0.0, self.price.tried_rows(len(sequences))
        spared = MOST_DRAFTED_ROWS - left
        if not left or _MARGIN * price >= 1:
            return MOST_DRAFTED_ROWS
        for sequence in sequences:
            sequence.draft.tokens = tokens = self._draft_of(config, sequence, price, left)
            left -= len(tokens)
        return left + spared

    def _go_on(self, model: ModelDrafts, sequences: Sequence[SequenceState], rows: int, left: int) -> None:
        """Give drafts of at most `left` tokens by a second model, in a step that has so many rows."""
        chosen = [(s, min(n, tokens_left(s))) for s, n in model.choose(sequences, rows, left)]
        asked = [AskedDraft(s, n, _forced(s)[:n]) for s, n in chosen]
        for one, tokens in zip(asked, model.model.continued(asked), strict=True):
            one.sequence.draft.tokens, one.sequence.draft.length = tokens, one.sequence.length
            model.note(one, len(tokens))

    def _draft_of(self, config: SpeculativeConfig, sequence: SequenceState, price: float, most: int) -> list[int]:
        """Return the draft of a sequence, of at most `most` tokens."""
        draft = sequence.draft
        if draft.history is None:
            assert self._drafter is not None, "there is one with a configuration"
            draft.history = TokenHistory(self._drafter, sequence.given_ids)
        draft.history.extend(sequence.generated[len(draft.history) - len(sequence.given_ids) :])
        draft.length = sequence.length
        most, least = min(config.num_speculative_tokens, tokens_left(sequence), most), _MARGIN * price
        grammar = sequence.sampler.matcher
        if grammar is None:
            return draft.history.draft(most, least)
        tokens = draft.history.draft(most, least, _forced(sequence))
        return tokens[: grammar.allowed(tokens)]


def _forced(sequence: SequenceState) -> list[int]:
    """Return the tokens that must come next by a sequence's grammar, as the tokenizer writes them; none without one."""
    grammar = sequence.sampler.matcher
    if grammar is None:
        return []
    grammar.follow(sequence.generated)
    return grammar.forced()


def drafter_of(config: SpeculativeConfig | None) -> Drafter | None:
    """Return what looks up the last tokens of sequences, and keeps what they generated; None without settings."""
    if config is None:
        return None
    if config.method == "ngram":
        return Drafter(config.prompt_lookup_min, config.prompt_lookup_max, outputs=0, least=0.0)
    outputs, least = config.suffix_decoding_max_cached_requests, config.suffix_decoding_min_token_prob
    return Drafter(1, config.suffix_decoding_max_tree_depth, outputs, least)


def is_right(sequence: SequenceState, place: int) -> bool:
    """Return whether a sequence goes on, and its newest token is that of its draft at `place`."""
    tokens = sequence.draft.tokens
    return place < len(tokens) and sequence.finish_reason is None and sequence.generated[-1] == tokens[place]
