"""The hidden states with which a layer for multi-token prediction reads tokens that it has not read yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcdecode.requests.sequence import SequenceState

_MOST = 128  # tokens of a sequence that may be left to read; what is older is forgotten


@dataclass(slots=True)
class _OfSequence:
    """Hidden states of a sequence's newest tokens, [n, hidden] of a step each; `first`: place of the first token."""

    first: int
    end: int
    rows: deque[Tensor] = field(default_factory=deque)


class UnreadStates:
    """Hidden states by sequence. Each is of the token before the one that is read with it."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], _OfSequence] = {}  # by seniority

    def __len__(self) -> int:
        """Return of how many sequences there are some."""
        return len(self._held)

    def take(self, sequence: SequenceState, rows: Tensor, end: int) -> None:
        """Take those of a sequence's tokens before the place `end`, [n, hidden]; drop others if there is a gap."""
        held = self._held.get(sequence.seniority)
        if held is None or held.end != end - len(rows):
            held = self._held[sequence.seniority] = _OfSequence(end - len(rows), end)
        held.rows.append(rows)
        held.end = end
        while held.end - held.first > _MOST:
            held.first += len(held.rows.popleft())

    def first(self, sequence: SequenceState) -> int | None:
        """Return the place of the first token of a sequence that can be read, or None if none can."""
        held = self._held.get(sequence.seniority)
        return None if held is None or held.end < len(sequence.given_ids) + len(sequence.generated) else held.first

    def since(self, sequence: SequenceState, known: int) -> Tensor:
        """Return those of a sequence's tokens from the place `known` on, [n, hidden]; forget those before."""
        held = self._held[sequence.seniority]
        while held.first + len(held.rows[0]) <= known:
            held.first += len(held.rows.popleft())
        rows = torch.cat([*held.rows]) if len(held.rows) > 1 else held.rows[0]
        return rows[known - held.first :]

    def forget(self, sequence: SequenceState) -> None:
        """Drop those of a sequence, if there are any."""
        self._held.pop(sequence.seniority, None)

    def forget_all(self) -> None:
        """Drop those of all sequences."""
        self._held.clear()
