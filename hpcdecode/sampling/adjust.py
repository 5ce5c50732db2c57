"""What sampling parameters change in the logits before a token is chosen: bans, biases, penalties and grammars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.requests.counts import TokenCounts
from hpcdecode.requests.matcher import Matcher
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.sampling.grammars import Grammars
from hpcdecode.sampling.masks import keep_allowed
from hpcdecode.sampling.rows import values_on
from hpcdecode.system.uploads import upload

_FORBIDDEN = float("-inf")


def adjust(
    logits: Tensor, sequences: Sequence[SequenceState], eos: frozenset[int], grammars: Grammars | None = None
) -> None:
    """Apply bad_words, min_tokens, logit_bias and penalties in vLLM's order, then grammars and budgets.

    Args:
        logits: float32 [n, vocab], changed in place.
        sequences: [n].
        eos: End-of-sequence tokens, which min_tokens holds back.
        grammars: Needed if a request has structured_outputs.
    """
    forbidden = [(row, token) for row, s in enumerate(sequences) for token in _forbidden(s, eos, logits.shape[1])]
    if forbidden:
        logits[_places(logits, forbidden)] = _FORBIDDEN
    biases = [(row, *bias) for row, s in enumerate(sequences) for bias in s.prompt.params.logit_bias.items()]
    if biases:
        added = values_on(logits.device, [bias for *_, bias in biases], logits.dtype)
        logits[_places(logits, [place for *place, _ in biases])] += added
    _penalize(logits, [(row, s) for row, s in enumerate(sequences) if s.prompt.params.penalizes])
    _restrict(logits, sequences, grammars)
    _end_thinking(logits, sequences)


def _restrict(logits: Tensor, sequences: Sequence[SequenceState], grammars: Grammars | None) -> None:
    """Forbid, in float32 logits [n, vocab], what the requests' grammars do not allow.

    A grammar wins over other parameters: if those forbid all that it allows, its tokens become equally likely.
    """
    rows = [row for row, s in enumerate(sequences) if s.prompt.params.structured_outputs is not None]
    if not rows:
        return
    if grammars is None:
        raise ValueError("grammars: expected those of the model for structured_outputs, got None")
    matchers = [_followed(sequences[row], grammars) for row in rows]
    masks = grammars.allowed(matchers, logits.shape[1], torch.get_num_threads())
    for row, matcher in zip(rows, matchers, strict=True):
        if matcher.problem is not None:
            sequences[row].error = f"structured_outputs: the grammar cannot be followed: {matcher.problem}"
    keep_allowed(logits, rows, masks)


def _followed(sequence: SequenceState, grammars: Grammars) -> Matcher:
    """Return the matcher of a sequence's grammar, behind all that the sequence has generated."""
    if (matcher := sequence.sampler.matcher) is None:
        asked = sequence.prompt.params.structured_outputs
        assert asked is not None, "expected a sequence with a grammar"
        matcher = sequence.sampler.matcher = grammars.matcher(asked)
    matcher.follow(sequence.generated)
    return matcher


def _end_thinking(logits: Tensor, sequences: Sequence[SequenceState]) -> None:
    """Leave, in logits [n, vocab], only the token that ends a reasoning which has taken its tokens."""
    for row, sequence in enumerate(sequences):
        thinking, budget = sequence.prompt.thinking, sequence.prompt.params.thinking_token_budget
        if thinking is None or budget is None or sequence.sampler.thought:
            continue
        token, sequence.sampler.thought = thinking.forced(budget, sequence.generated)
        if token is not None:
            logits[row].fill_(_FORBIDDEN)
            logits[row, token] = 0.0


def _forbidden(sequence: SequenceState, eos: frozenset[int], vocabulary: int) -> Iterable[int]:
    """Yield the tokens that would end the sequence before min_tokens, or complete one of its bad words."""
    params, generated = sequence.prompt.params, sequence.generated
    if len(generated) < params.min_tokens:
        yield from (token for token in eos.union(params.stop_token_ids) if token < vocabulary)
    for *begin, last in sequence.prompt.bad_word_ids:
        if generated[max(len(generated) - len(begin), 0) :] == begin:
            yield last


def _penalize(logits: Tensor, penalized: list[tuple[int, SequenceState]]) -> None:
    """Apply the repetition penalty over prompt and output, then those of the OpenAI API over the output."""
    if not penalized:
        return
    held = [_counts(sequence) for _, sequence in penalized]
    sizes = [len(h.ids) for h in held]
    params = [sequence.prompt.params for _, sequence in penalized]

    def column(name: str) -> NDArray[np.float32]:
        """Return a parameter for every token of every sequence."""
        return np.repeat(np.array([getattr(p, name) for p in params], np.float32), sizes)

    rows, tokens, counts, repetition, frequency, presence = upload(
        logits.device,
        np.repeat([row for row, _ in penalized], sizes),
        np.concatenate([h.ids for h in held]),
        np.concatenate([h.counts for h in held]),
        *map(column, ("repetition_penalty", "frequency_penalty", "presence_penalty")),
    )
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    logits[rows, tokens] = values


def _counts(sequence: SequenceState) -> TokenCounts:
    """Return the sequence's token counts, which include its last token."""
    if sequence.sampler.counts is None:
        sequence.sampler.counts = TokenCounts(sequence.prompt.token_ids)
    return sequence.sampler.counts.update(sequence.generated)


def _places(logits: Tensor, pairs: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return pairs of row and token as an index of logits."""
    (places,) = upload(logits.device, np.array(pairs, np.int64).T)
    return places[0], places[1]
