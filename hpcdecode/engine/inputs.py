"""What goes into the slices in one step, and which of its logits are for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdecode.engine.model_inputs import ModelInputs, StepTokens
from hpcdecode.errors import InvariantViolation
from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.sampling.logprobs import logprobs
from hpcdecode.schedule.step import Chunk, Step


class PromptRows(NamedTuple):
    """Rows of logits that a prompt's log-probabilities come from: sample 0, the first row, and the positions."""

    sequence: SequenceState
    first: int
    positions: range


class Inputs:
    """What the slices take in one step, and which row of logits each sampled sequence draws from.

    Args:
        step: of a lane.
        device: of the slices.
        forgotten: keys of prefixes that are not needed any more.

    Attributes:
        on_host: what the slices take, in the memory of the host.
        model: the same on the device.
    """

    def __init__(self, step: Step, device: torch.device, forgotten: Sequence[int] = ()):
        ids = [s.generated[-1] for s in step.decode]
        positions = [s.length for s in step.decode]
        logits_indices = list(range(len(ids)))
        sample_indices = list(logits_indices)
        self._prompts: list[PromptRows] = []
        skipped_queries: list[int] = []
        for chunk in step.prefill:
            first, end = len(ids), chunk.start + chunk.count
            ids += chunk.sequence.input_ids[chunk.start : end]
            positions += range(chunk.start, end)
            asked = _asked(chunk)
            skipped_queries.append(0 if asked else chunk.count - bool(chunk.sampled))
            if asked:
                self._prompts.append(PromptRows(_first_sample(chunk), len(logits_indices), asked))
                logits_indices += range(first + asked.start - chunk.start, first + asked.stop - chunk.start)
            if chunk.sampled:
                sample_indices += [len(logits_indices)] * len(chunk.sampled)
                logits_indices.append(len(ids) - 1)
        largest = not self._prompts and all(_plain_greedy(s) for s in step.sampled)
        self._sample_indices = None if sample_indices == list(range(len(logits_indices))) else _tensor(sample_indices)
        tokens = StepTokens(_tensor(ids), _tensor(positions), _tensor(logits_indices))
        self._check_sample_indices(step, *tokens)
        parts = [chunk.part for chunk in step.prefill]
        self.on_host = ModelInputs(len(step.decode), tokens, parts, skipped_queries, forgotten, largest)
        self.model = self.on_host.on(device)

    def select(self, rows: Tensor) -> Tensor:
        """Select from the rows of kept tokens [L, ...] one row for each sampled sequence, in their order."""
        return rows if self._sample_indices is None else rows[self._sample_indices.to(rows.device)]

    def _check_sample_indices(self, step: Step, ids: Tensor, positions: Tensor, logits_indices: Tensor) -> None:
        """Raise InvariantViolation unless each sampled sequence draws from the logits of its own last token."""
        sampled = step.sampled
        last = [s.generated[-1] if s.generated else s.prompt.token_ids[-1] for s in sampled]
        place = [len(s.prompt.token_ids) + len(s.generated) - 1 for s in sampled]
        tokens, places = (self.select(x[logits_indices]).tolist() for x in (ids, positions))
        if tokens != last or places != place:
            raise InvariantViolation(
                "each sequence draws from the logits of its last token",
                f"expected tokens {last[:8]} at positions {place[:8]}, got {tokens[:8]} at {places[:8]}",
            )

    def take_prompt_logprobs(self, logits: Tensor) -> None:
        """Keep those of the prompts that ask for them."""
        for sequence, row, positions in self._prompts:
            held, prompt = sequence.prompt_logprobs, sequence.prompt
            if held is None or len(held) != positions.start + 1:  # another sample's prefill has been here
                continue
            tokens = [prompt.token_ids[p + 1] for p in positions]
            counts = [prompt.params.prompt_logprobs or 0] * len(tokens)
            for entry in logprobs(logits[row : row + len(tokens)], tokens, counts):
                held.add(*entry)


def take_logprobs(logits: Tensor, sequences: list[SequenceState], tokens: list[int]) -> None:
    """Keep those of the sampled tokens, from logits [n, vocab], for the sequences that ask for them."""
    rows = [row for row, s in enumerate(sequences) if s.logprobs is not None]
    if not rows:
        return
    counts = [sequences[row].prompt.params.logprobs or 0 for row in rows]
    own = logits if len(rows) == len(sequences) else logits[rows]
    for row, entry in zip(rows, logprobs(own, [tokens[row] for row in rows], counts), strict=True):
        held = sequences[row].logprobs
        if held is not None:
            held.add(*entry)


def _plain_greedy(sequence: SequenceState) -> bool:
    """Whether it asks for nothing of its logits but the largest one's token."""
    return sequence.prompt.params.plain_greedy and sequence.logprobs is None and sequence.beams is None


def _first_sample(chunk: Chunk) -> SequenceState:
    """Return sample 0 of a chunk's request."""
    assert isinstance(chunk.sequence, SequenceState)
    return chunk.sequence.request.sequences[0]


def _asked(chunk: Chunk) -> range:
    """Return the positions of a chunk whose logits tell a log-probability of the prompt that is asked for."""
    if isinstance(chunk.sequence, Prefix):
        return range(0)
    held = _first_sample(chunk).prompt_logprobs
    if held is None or len(held) <= chunk.start:
        return range(0)
    return range(len(held) - 1, min(chunk.start + chunk.count, len(chunk.sequence.prompt.token_ids) - 1))


def _tensor(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))
