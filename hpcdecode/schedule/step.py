"""What a lane does in one step, as the S-rank sees it: a plan, and the sequences behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdecode.requests.prefix import Prefix
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.plan import Plan


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
    def resumed(self) -> bool:
        """Return whether its sequence goes on with tokens that an earlier run generated."""
        return isinstance(self.sequence, SequenceState) and self.sequence.resumed > 0

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
