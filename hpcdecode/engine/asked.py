"""Log-probabilities of tokens that are given: which positions of a chunk tell them, and taking them from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.requests.target import Target
from hpcdecode.sampling.logprobs import logprobs
from hpcdecode.sampling.sampler import argmax
from hpcdecode.schedule.step import Chunk


class Asking(Protocol):
    """Keeps the log-probabilities of a run of tokens that are given."""

    @property
    def next_position(self) -> int:
        """Return the first position whose logits it has not seen."""

    @property
    def end_position(self) -> int:
        """Return the position behind the last one whose logits it asks for."""

    def take(self, logits: Tensor, start: int) -> None:
        """Keep what logits [n, vocab] of the positions from `start` on tell."""


class AskedPrompt:
    """Those of a prompt, for a row that asks for `prompt_logprobs`."""

    def __init__(self, sequence: SequenceState, held: Logprobs):
        self.held, self.ids, self.count = held, sequence.prompt.token_ids, sequence.prompt.params.prompt_logprobs or 0

    @property
    def next_position(self) -> int:
        """Return the position of the last token that has one: the first has none."""
        return len(self.held) - 1

    @property
    def end_position(self) -> int:
        """Return the position of the last token, whose logits tell the first that is generated."""
        return len(self.ids) - 1

    def take(self, logits: Tensor, start: int) -> None:
        """Keep those of the tokens behind `start`."""
        _keep(self.held, logits, self.ids[start + 1 : start + 1 + len(logits)], self.count)


class AskedTarget:
    """Those of the scored tokens of a target."""

    def __init__(self, sequence: SequenceState, target: Target):
        self.target, self.scores, self.count = target, sequence.scores, sequence.prompt.params.logprobs or 0

    @property
    def next_position(self) -> int:
        """Return the position before the first token that has none yet."""
        return self.target.start - 1 + len(self.scores.body)

    @property
    def end_position(self) -> int:
        """Return the number of tokens that are prefilled: the last of them tells the tokens that may come next."""
        return len(self.target.input_ids)

    def take(self, logits: Tensor, start: int) -> None:
        """Keep those of the tokens behind `start`, and what greedy decoding would take in their place."""
        ids, scores, likeliest = self.target.input_ids, self.scores, argmax(logits).tolist()
        tokens = ids[start + 1 : start + 1 + len(logits)]
        _keep(scores.body, logits[: len(tokens)], tokens, self.count)
        scores.greedy += [token == best for token, best in zip(tokens, likeliest, strict=False)]
        if len(tokens) == len(logits):
            return
        last = self.target.last
        _keep(scores.ends, logits[-1:].expand(len(last), -1), last, self.count)
        scores.greedy_ends += [token == likeliest[-1] for token in last]


def _keep(held: Logprobs, logits: Tensor, tokens: list[int], count: int) -> None:
    for entry in logprobs(logits, tokens, [count] * len(tokens)):
        held.add(*entry)


class AskedRows(NamedTuple):
    """Rows of a step's logits, from `first` on, that belong to these positions."""

    asking: Asking
    first: int
    positions: range


def asked_of(chunk: Chunk, first: int) -> AskedRows | None:
    """Return what is asked of the logits of a chunk, or None; first: the row of the first of them."""
    asking = _asking(chunk)
    if asking is None:
        return None
    end = min(chunk.start + chunk.count, asking.end_position)
    positions = range(max(asking.next_position, chunk.start), end)
    return AskedRows(asking, first, positions) if positions else None


def take_asked(asked: Sequence[AskedRows], logits: Tensor, part: slice) -> None:
    """Let all take what the logits [n, vocab] of these rows of a step tell."""
    for asking, first, positions in asked:
        start, stop = max(first, part.start), min(first + len(positions), part.stop)
        position = positions.start + start - first
        if start < stop and asking.next_position == position:  # else another sample's prefill has been here
            asking.take(logits[start - part.start : stop - part.start], position)


def _asking(chunk: Chunk) -> Asking | None:
    sequence = chunk.sequence
    if isinstance(sequence, Prefix):
        return None
    if sequence.target is not None:
        return AskedTarget(sequence, sequence.target)
    first = sequence.request.sequences[0]  # sample 0 keeps those of the prompt
    return None if first.prompt_logprobs is None else AskedPrompt(first, first.prompt_logprobs)
