"""What a lane does in one step, as the S-rank sees it: a plan, and the sequences behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.plan import Plan


class PromptPart(msgspec.Struct, frozen=True, array_like=True):
    """What attends from a prompt in one step: its tokens [start, start + count).

    Attributes:
        key: Of the sequence or prefix whose prompt it is.
        start: First of its tokens.
        count: Number of its tokens.
        length: Of the whole prompt, with what an earlier run generated.
        shared: Tokens of the prefix that the prompt begins with, or 0.
        prefix: Key of that prefix, or -1.
        lasts: Whether it is of a prefix, whose K and V are held until it is dropped.
        resumed: Tokens at the end of the prompt that an earlier run generated.
    """

    key: int
    start: int
    count: int
    length: int
    shared: int = 0
    prefix: int = -1
    lasts: bool = False
    resumed: int = 0

    @property
    def completes(self) -> bool:
        """Return whether nothing of the prompt is left after it."""
        return self.start + self.count == self.length

    @property
    def begins(self) -> bool:
        """Return whether nothing of the prompt was prefilled before, but a prefix that it shares."""
        return self.start == self.shared


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt that is prefilled in one step: tokens [start, start + count) of its sequence or prefix."""

    sequence: SequenceState | Prefix
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Return whether nothing of the prompt is left after it."""
        return self.start + self.count == self.sequence.prompt_length

    @property
    def begins(self) -> bool:
        """Return whether nothing of the prompt was prefilled before, but a prefix that it shares."""
        return self.start == (self.sequence.prefix.prompt_length if self.sequence.prefix else 0)

    @property
    def part(self) -> PromptPart:
        """Return what attends from it."""
        sequence, prefix = self.sequence, self.sequence.prefix
        lasts = isinstance(sequence, Prefix)
        return PromptPart(
            key=sequence.key,
            start=self.start,
            count=self.count,
            length=sequence.prompt_length,
            shared=prefix.prompt_length if prefix else 0,
            prefix=prefix.key if prefix else -1,
            lasts=lasts,
            resumed=0 if isinstance(sequence, Prefix) else sequence.resumed,
        )

    @property
    def sampled(self) -> Sequence[SequenceState]:
        """Return the sequences that draw a token from the logits of its end."""
        return self.sequence.with_forks if self.completes else ()


@dataclass(frozen=True, slots=True)
class Step:
    """A plan with the sequences behind it."""

    plan: Plan
    decode: list[SequenceState]
    prefill: list[Chunk]

    @property
    def sampled(self) -> list[SequenceState]:
        """Return the sequences that get a token in this step, in the order of their logits."""
        return self.decode + [s for c in self.prefill for s in c.sampled]

    def stamp_queued(self, now: float) -> None:
        """Note when prompts begin, as Unix time."""
        for chunk in self.prefill:
            for sequence in chunk.sequence.with_forks:
                sequence.times.queued = sequence.times.queued or now

    def stamp_first(self, now: float) -> None:
        """Note when sequences get their first token, as Unix time."""
        for chunk in self.prefill:
            if chunk.completes:
                for sequence in chunk.sequence.with_forks:
                    sequence.times.first_token = sequence.times.first_token or now
