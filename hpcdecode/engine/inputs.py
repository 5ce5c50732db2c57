"""What goes into the slices in one step, and which of its logits are for whom."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdecode.engine.asked import AskedRows, asked_of, take_asked
from hpcdecode.engine.model_inputs import ModelInputs, StepTokens
from hpcdecode.errors import InvariantViolation
from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.sampling.logprobs import logprobs
from hpcdecode.sampling.rows import rows_of
from hpcdecode.schedule.speculation import Speculation
from hpcdecode.schedule.step import Chunk, Step
from hpcdecode.system.uploads import upload

_STATES = 64  # tokens of a prompt, before its last one, whose hidden states are handed on


class PromptStates(NamedTuple):
    """Positions of a prompt whose hidden states are handed on, for the sequences that begin with it."""

    sequences: Sequence[SequenceState]
    positions: range

    @classmethod
    def of(cls, chunk: Chunk) -> PromptStates | None:
        """Return those of a chunk, of the last positions of its prompt but one; None if there are none."""
        if isinstance(chunk.sequence, Prefix) or chunk.sequence.target is not None:
            return None
        end = chunk.sequence.prompt_length - 1
        positions = range(max(chunk.start, end - _STATES), min(chunk.start + chunk.count, end))
        return cls(chunk.sequence.with_forks, positions) if positions else None


class Inputs:
    """What the slices take in one step, and which row of logits each sampled sequence draws from.

    Args:
        step: of a lane.
        device: of the slices.
        forgotten: keys of prefixes that are not needed any more.
        states: whether hidden states of the last tokens of prompts are needed, too.

    Attributes:
        on_host: what the slices take, in the memory of the host.
        model: the same on the device.
        drawing: the sampled sequences that draw a token; the others are scored.
        drawn: of steps with drafts, logits that tokens were drawn from [n, vocab]; the largest ones' tokens, int64 [n],
            if no more was needed. None before they are known.
        hidden: last hidden states [L, hidden] that the logits are of, part by part, if the model hands them on.
        states: those of tokens of prompts that have no logits, in the order of the chunks, or None.
        first_rows: of sequences that decode, by their ids, if any has a draft; the rows of the draft are behind it.
    """

    def __init__(self, step: Step, device: torch.device, forgotten: Sequence[int] = (), states: bool = False):
        ids: list[int] = []
        positions: list[int] = []
        adapters: list[int] = []
        rows: list[int] = []  # of logits, by sampled sequence
        for sequence in step.decode:
            fed, length = (sequence.generated[-1], *sequence.draft.tokens), sequence.length
            rows.append(len(ids))
            ids += fed
            positions += range(length, length + len(fed))
            adapters += [sequence.adapter] * len(fed)
        decodes = len(ids)
        logits_indices = list(range(decodes))
        self.first_rows = dict(zip(map(id, step.decode), rows, strict=True)) if decodes > len(rows) else {}
        self._asked: list[AskedRows] = []
        self._of_prompts: list[PromptStates] = []
        stated: list[int] = []
        skipped_queries: list[int] = []
        for chunk in step.prefill:
            first, end = len(ids), chunk.start + chunk.count
            ids += chunk.sequence.input_ids[chunk.start : end]
            positions += range(chunk.start, end)
            adapters += [chunk.sequence.adapter] * chunk.count
            asked = asked_of(chunk, len(logits_indices))
            if asked:
                self._asked.append(asked)
                begin = asked.positions.start - chunk.start
                logits_indices += range(first + begin, first + begin + len(asked.positions))
            begin = begin if asked else chunk.count - bool(chunk.sampled)
            if states and (own := PromptStates.of(chunk)):
                begin = min(begin, own.positions.start - chunk.start)
                stated += range(first + own.positions.start - chunk.start, first + own.positions.stop - chunk.start)
                self._of_prompts.append(own)
            skipped_queries.append(begin)
            if chunk.sampled:
                if logits_indices[-1:] != [len(ids) - 1]:
                    logits_indices.append(len(ids) - 1)
                rows += [len(logits_indices) - 1] * len(chunk.sampled)
        self._rows, self.hidden = rows, list[Tensor]()
        self.states: Tensor | None = None
        self._sampled = step.sampled
        self.drawn: Tensor | None = None
        self.drawing = [s for s in self._sampled if s.target is None]
        largest = not self._asked and all(map(_plain_greedy, self.drawing))
        drawn = [row for row, s in zip(rows, self._sampled, strict=True) if s.target is None]
        self._drawn = sorted({*drawn, *range(decodes)})  # rows of logits that tokens are drawn from, in their order
        places = {row: place for place, row in enumerate(self._drawn)}
        sample_indices = [places[row] for row in drawn]
        self._selects_all = sample_indices == list(range(len(self._drawn)))
        updated = _tensor(adapters) if any(adapter >= 0 for adapter in adapters) else None
        tokens = StepTokens(_tensor(ids), _tensor(positions), _tensor([*logits_indices, *stated]), updated)
        self._check_sample_indices(rows, *tokens[:3])
        parts = [chunk.part for chunk in step.prefill]
        self.on_host = ModelInputs(
            decodes, tokens, parts, skipped_queries, forgotten, largest, bool(self._asked), len(stated)
        )
        arrays = [np.array(x, np.int64) for x in (self._drawn, sample_indices)]
        *there, self._drawn_rows, self._sample_indices = upload(device, *(x.numpy() for x in tokens.context), *arrays)
        self.model = replace(self.on_host, tokens=StepTokens(*there))

    def keep(self, rows: Tensor) -> None:
        """Keep the rows that tokens are drawn from, or the largest ones' tokens, if drafts need them."""
        if self.first_rows:
            self.drawn = rows

    def select(self, rows: Tensor) -> Tensor:
        """Select from the rows that tokens are drawn from [n, ...] one row for each sequence that draws."""
        return rows if self._selects_all else rows.index_select(0, self._sample_indices)

    def drawn_from(self, logits: Tensor, part: slice) -> Tensor:
        """Return the rows that tokens are drawn from of logits [n, vocab], those of a part."""
        first, end = (bisect_left(self._drawn, row) for row in (part.start, part.stop))
        if end - first == len(logits):
            return logits
        return logits.index_select(0, self._drawn_rows[first:end] - part.start)

    def hand_hidden(self, speculation: Speculation) -> None:
        """Hand on the hidden states of tokens that sequences go on from, once these have their new tokens."""
        if self.states is not None:
            parts = self.states.split([len(own.positions) for own in self._of_prompts])
            for own, rows in zip(self._of_prompts, parts, strict=True):
                speculation.take_prompt_states(own.sequences, rows, own.positions.stop)
        if self.hidden:
            hidden = self.hidden[0] if len(self.hidden) == 1 else torch.cat(self.hidden)
            speculation.take_hidden(self._sampled, self._rows, hidden)

    def spread(self, tokens: Sequence[int]) -> list[int]:
        """Return a token for each sampled sequence, given those of the sequences that draw; -1 for the others."""
        drawn = iter(tokens)
        return [next(drawn) if s.target is None else -1 for s in self._sampled]

    def take_asked(self, logits: Tensor, part: slice) -> None:
        """Keep the log-probabilities of prompts and targets that logits [n, vocab], those of a part, tell."""
        take_asked(self._asked, logits, part)

    def _check_sample_indices(self, rows: list[int], ids: Tensor, positions: Tensor, logits_indices: Tensor) -> None:
        """Raise InvariantViolation unless each sampled sequence has the logits of its own last token."""
        last = [s.generated[-1] if s.generated else s.given_ids[-1] for s in self._sampled]
        place = [len(s.given_ids) + len(s.generated) - 1 for s in self._sampled]
        tokens, places = (x[logits_indices][rows].tolist() for x in (ids, positions))
        if tokens != last or places != place:
            raise InvariantViolation(
                "each sequence draws from the logits of its last token",
                f"expected tokens {last[:8]} at positions {place[:8]}, got {tokens[:8]} at {places[:8]}",
            )


def take_logprobs(logits: Tensor, sequences: list[SequenceState], tokens: list[int]) -> None:
    """Keep those of the sampled tokens, from logits [n, vocab], for the sequences that ask for them."""
    rows = [row for row, s in enumerate(sequences) if s.logprobs is not None]
    if not rows:
        return
    counts = [sequences[row].prompt.params.logprobs or 0 for row in rows]
    for row, entry in zip(rows, logprobs(rows_of(logits, rows), [tokens[row] for row in rows], counts), strict=True):
        held = sequences[row].logprobs
        if held is not None:
            held.add(*entry)


def _plain_greedy(sequence: SequenceState) -> bool:
    """Whether it asks for nothing of its logits but the largest one's token."""
    return sequence.prompt.params.plain_greedy and sequence.logprobs is None and sequence.beams is None


def _tensor(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))
