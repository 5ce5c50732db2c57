"""A plan: what one lane runs in one step, the same on every rank of the lane.

It is sent as one int32 array: number, flags, the counts of its tables, then the tables in the order of `_COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hpcdecode.schedule.prefixes import LEAST_PREFIXES

Table = NDArray[np.int32]

_STOP, _COLLECTIVE, _APART = 1, 2, 4
_COLUMNS = {"truncate": 3, "swap_out": 3, "release": 2, "fork": 3, "swap_in": 4, "decode": 2, "prefill": 4}
HEADER = 2 + len(_COLUMNS)  # elements
MOST_DRAFTED_ROWS = 256  # of a plan, beside a row of every sequence


_EMPTY = {name: np.empty((0, columns), np.int32) for name, columns in _COLUMNS.items()}


def _empty(name: str) -> Table:
    return _EMPTY[name]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a lane's ranks do in one step.

    An R-rank first drops what `truncate` names, copies what `swap_out` names, frees the slots in `release` and opens
    those of `fork` and `swap_in`. Then it makes room for one token of every decode row and for `tokens` of every
    prefill row. The lane's activations hold the decode rows first, then the prefill chunks. A sequence has one decode
    row, and one for each token of its draft behind it. A prefix has a row in `prefill` for every R-rank, with the same
    activations.

    Attributes:
        number: of the plan among those of its S-rank. R-ranks apply plans in this order, so that room is freed before
            it is taken again.
        truncate: int32 [n, 3], (R-rank, slot, length), drafts that were not confirmed.
        swap_out: int32 [n, 3], (R-rank, slot, ticket), K and V that a tier keeps; the slots are in `release`, too.
        release: int32 [n, 2], (R-rank, slot).
        fork: int32 [n, 3], (R-rank, slot, new slot).
        swap_in: int32 [n, 4], (R-rank, new slot, ticket, tokens), K and V to bring back.
        decode: int32 [n, 2], (R-rank, slot).
        prefill: int32 [n, 4], (R-rank, slot, first row, tokens).
        stop: whether it is the lane's last.
        collective: whether its layers cross by collectives, in which all ranks of the lane take part.
        apart: whether its rows, all of prompts, come from a rank that only prefills, beside the lane's next plans.
    """

    number: int = 0
    truncate: Table = field(default_factory=lambda: _empty("truncate"))
    swap_out: Table = field(default_factory=lambda: _empty("swap_out"))
    release: Table = field(default_factory=lambda: _empty("release"))
    fork: Table = field(default_factory=lambda: _empty("fork"))
    swap_in: Table = field(default_factory=lambda: _empty("swap_in"))
    decode: Table = field(default_factory=lambda: _empty("decode"))
    prefill: Table = field(default_factory=lambda: _empty("prefill"))
    stop: bool = False
    collective: bool = False
    apart: bool = False

    @property
    def decode_tokens(self) -> int:
        """Return the number of decode rows."""
        return len(self.decode)

    @property
    def prefill_tokens(self) -> int:
        """Return the number of prefill rows."""
        ends = self.prefill[:, 2] + self.prefill[:, 3]
        return int(ends.max(initial=len(self.decode))) - len(self.decode)

    @property
    def changes_slots(self) -> bool:
        """Return whether it shortens, frees, forks or fills any."""
        return len(self.truncate) + len(self.release) + len(self.fork) + len(self.swap_in) > 0

    @property
    def runs_model(self) -> bool:
        """Return whether it has rows."""
        return len(self.decode) + len(self.prefill) > 0

    def parted(self) -> tuple[Plan, Plan]:
        """Return a plan that frees and forks slots, and one of the rest."""
        rest = replace(self, truncate=_empty("truncate"), release=_empty("release"), fork=_empty("fork"))
        return Plan(truncate=self.truncate, release=self.release, fork=self.fork), rest

    @property
    def length(self) -> int:
        """Return the int32 elements that it takes."""
        return HEADER + sum(table.size for table in self._tables)

    @property
    def _tables(self) -> list[Table]:
        return [getattr(self, name) for name in _COLUMNS]

    def encode(self, out: Table) -> int:
        """Write the plan to `out`, of at least `wire_length(slots)` elements; return how many it takes."""
        flags = _STOP * self.stop + _COLLECTIVE * self.collective + _APART * self.apart
        parts = self._tables
        out[:HEADER] = (self.number, flags, *map(len, parts))
        at = HEADER
        for part in parts:
            if part.size:
                out[at : at + part.size] = part.reshape(-1)
                at += part.size
        return at

    @staticmethod
    def decode_from(wire: Table) -> Plan:
        """Read a plan that `encode` wrote."""
        number, flags, *counts = wire[:HEADER].tolist()
        parts, at = dict(_EMPTY), HEADER
        for rows, (name, columns) in zip(counts, _COLUMNS.items(), strict=True):
            if rows:
                parts[name] = wire[at : at + rows * columns].reshape(rows, columns).copy()
                at += rows * columns
        stop, collective, apart = (bool(flags & flag) for flag in (_STOP, _COLLECTIVE, _APART))
        return Plan(number=number, stop=stop, collective=collective, apart=apart, **parts)


def table_of(rows: Iterable[tuple[int, ...]], columns: int) -> Table:
    """Return rows as a table of a plan, int32 [n, columns]."""
    listed = list(rows)
    return np.array(listed, np.int32).reshape(-1, columns) if listed else np.empty((0, columns), np.int32)


def length_of(wire: Table) -> int:
    """Return the elements of the plan that begins in `wire`."""
    counts = (int(x) for x in wire[HEADER - len(_COLUMNS) : HEADER])
    return HEADER + sum(rows * columns for rows, columns in zip(counts, _COLUMNS.values(), strict=True))


def wire_length(slots: int, ranks: int) -> int:
    """Return the int32 elements that any plan of a lane needs, by its slots and its R-ranks."""
    drafted, prefixes = _COLUMNS["decode"] * MOST_DRAFTED_ROWS, max(LEAST_PREFIXES, slots // 5)
    return HEADER + sum(_COLUMNS.values()) * slots + drafted + (2 + 3 + 4) * prefixes * ranks
