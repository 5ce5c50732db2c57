"""A plan: what one lane runs in one step, the same on every rank of the lane.

On the wire a plan is one int32 array: number, flags, the four counts, then `release`, `fork`, `decode` and `prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hpcdecode.schedule.prefixes import MOST

_HEADER = 6
_STOP = 1


def _table(columns: int) -> np.ndarray:
    return np.empty((0, columns), np.int32)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of `release` and `decode` are (R-rank, slot); of `fork` (R-rank, slot, new slot); of `prefill` (R-rank,
    slot, first row, tokens). All int32.

    An R-rank first frees the slots in `release`, then opens the new slots of `fork`, then makes room for one token of
    every decode row and for `tokens` of every prefill row. The lane's activations hold the decode rows first, then the
    prefill chunks; a prefix has a row in `prefill` for every R-rank, with the same activations.
    `number` counts the plans of an S-rank over all its lanes: R-ranks begin them in this order, so that room is
    freed before it is taken again.
    """

    number: int = 0
    release: np.ndarray = field(default_factory=lambda: _table(2))
    fork: np.ndarray = field(default_factory=lambda: _table(3))
    decode: np.ndarray = field(default_factory=lambda: _table(2))
    prefill: np.ndarray = field(default_factory=lambda: _table(4))
    stop: bool = False

    @property
    def decode_tokens(self) -> int:
        return len(self.decode)

    @property
    def prefill_tokens(self) -> int:
        ends = self.prefill[:, 2] + self.prefill[:, 3]
        return int(ends.max(initial=len(self.decode))) - len(self.decode)

    @property
    def changes_slots(self) -> bool:
        return len(self.release) + len(self.fork) > 0

    @property
    def runs_model(self) -> bool:
        return len(self.decode) + len(self.prefill) > 0

    def encode(self, out: np.ndarray) -> int:
        """Write the plan to `out`, int32 of at least `wire_length(slots)` elements; returns how many it takes."""
        flags = _STOP if self.stop else 0
        parts = (self.release, self.fork, self.decode, self.prefill)
        out[:_HEADER] = (self.number, flags, *map(len, parts))
        at = _HEADER
        for part in parts:
            out[at : at + part.size] = part.reshape(-1)
            at += part.size
        return at

    @staticmethod
    def decode_from(wire: np.ndarray) -> Plan:
        number, flags, *counts = (int(x) for x in wire[:_HEADER])
        parts, at = [], _HEADER
        for rows, columns in zip(counts, (2, 3, 2, 4), strict=True):
            parts.append(wire[at : at + rows * columns].reshape(rows, columns).copy())
            at += rows * columns
        return Plan(number, *parts, stop=bool(flags & _STOP))


def wire_length(slots: int, ranks: int) -> int:
    """int32 elements that any plan over `slots` sequences of a lane and its prefixes on `ranks` R-ranks needs."""
    return _HEADER + 11 * slots + (2 + 3 + 4) * MOST * ranks
