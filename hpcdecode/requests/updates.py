"""Tokens of rows in flight, told as they come."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.sequence import SequenceState


class Update(msgspec.Struct, array_like=True):
    """New tokens of a sample of a row in flight.

    Attributes:
        line: Of the row.
        token_ids: Since the last update of the sample, the token that ended it included.
        logprobs: Of these tokens, if the row asks for them.
        begin: How many tokens the sample had before them.
    """

    line: int
    sample: int
    token_ids: list[int]
    logprobs: Logprobs | None = None
    begin: int = 0

    def after(self, told: int) -> Update | None:
        """Return what comes after the first `told` tokens of the sample, or None."""
        if told <= self.begin:
            return self
        tokens = self.token_ids[told - self.begin :]
        logprobs = self.logprobs and self.logprobs.part(told - self.begin, len(self.token_ids))
        return Update(self.line, self.sample, tokens, logprobs, told) if tokens else None


def updates_of(sequences: Sequence[SequenceState]) -> list[Update]:
    """Return the newest tokens of the sequences of a step, of rows whose tokens are told.

    Beams have none before their end, and neither have targets. The first update of a sequence that goes on after an
    interruption has all its tokens.
    """
    told = (s for s in sequences if s.prompt.updates and s.beams is None and s.target is None)
    return [_newest(sequence) for sequence in told]


def _newest(sequence: SequenceState) -> Update:
    end = len(sequence.generated)
    begin = 0 if end == sequence.resumed + 1 else end - 1
    logprobs = sequence.logprobs and sequence.logprobs.part(begin, end)
    return Update(sequence.prompt.line, sequence.sample, sequence.generated[begin:], logprobs, begin)
