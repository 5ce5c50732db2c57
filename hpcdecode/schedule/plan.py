"""A plan: what one lane runs in one step, the same on every rank of the lane.

On the wire a plan is one int32 array: number, flags, the three counts, then `release`, `decode` and `prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_HEADER = 5
_STOP = 1


def _table(columns: int) -> np.ndarray:
    return np.empty((0, columns), np.int32)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of `release` and `decode` are (R-rank, slot); of `prefill` (R-rank, slot, tokens). All int32.

    An R-rank first frees the slots in `release`, then makes room for one token of every decode row and for
    `tokens` of every prefill row. The lane's activations hold the decode rows first, then the prefill chunks.
    `number` counts the plans of an S-rank over all its lanes: R-ranks begin them in this order, so that room is
    freed before it is taken again.
    """

    number: int = 0
    release: np.ndarray = field(default_factory=lambda: _table(2))
    decode: np.ndarray = field(default_factory=lambda: _table(2))
    prefill: np.ndarray = field(default_factory=lambda: _table(3))
    stop: bool = False

    @property
    def decode_tokens(self) -> int:
        return len(self.decode)

    @property
    def prefill_tokens(self) -> int:
        return int(self.prefill[:, 2].sum())

    @property
    def runs_model(self) -> bool:
        return len(self.decode) + len(self.prefill) > 0

    def encode(self, out: np.ndarray) -> None:
        """Write the plan to `out`, int32 of at least `wire_length(slots)` elements."""
        flags = _STOP if self.stop else 0
        out[:_HEADER] = (self.number, flags, len(self.release), len(self.decode), len(self.prefill))
        at = _HEADER
        for part in (self.release, self.decode, self.prefill):
            out[at : at + part.size] = part.reshape(-1)
            at += part.size

    @staticmethod
    def decode_from(wire: np.ndarray) -> Plan:
        number, flags, releases, decodes, prefills = (int(x) for x in wire[:_HEADER])
        parts, at = [], _HEADER
        for rows, columns in ((releases, 2), (decodes, 2), (prefills, 3)):
            parts.append(wire[at : at + rows * columns].reshape(rows, columns).copy())
            at += rows * columns
        return Plan(number, *parts, stop=bool(flags & _STOP))


def wire_length(slots: int) -> int:
    """int32 elements that any plan over `slots` sequences of a lane needs."""
    return _HEADER + 7 * slots
