"""What a plan asks of one R-rank: its share, in pieces that are exchanged and attended one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.shapes import LayerShape, MixerShape
from hpcdecode.schedule.plan import Plan

Slots = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Piece:
    """Sequences of a share that are exchanged and attended together.

    Attributes:
        decode_slots, decode_counts: int32 [n], as `KvCache.attend` takes them; a count is 1, and one more for each
            token of a draft. For layers that keep a state prompts are among them.
        decode_rows: int64 [sum(decode_counts)], their rows in the lane.
        prefill_slots, prefill_counts: int32 [p], as `KvCache.append` takes them.
        prefill_rows: int64 [sum(prefill_counts)], their rows in the lane.
    """

    decode_slots: Slots
    decode_counts: Slots
    decode_rows: NDArray[np.int64]
    prefill_slots: Slots
    prefill_counts: Slots
    prefill_rows: NDArray[np.int64]

    def elements(self, shape: MixerShape) -> int:
        """Return the elements that the R-rank receives for one layer of `shape`."""
        return len(self.decode_rows) * shape.row_columns + len(self.prefill_rows) * prompt_columns(shape)


class Share:
    """One R-rank's part of a plan: what it does to its slots, and its rows of every layer.

    Args:
        plan: of one lane step.
        rank: the R-rank as the plan names it.
        first_slot: of the KV cache, the first that is the lane's.
        count: pieces at most.

    Attributes:
        truncate: int32 [n, 2], (slot, length) of what is shortened.
        swap_out: int32 [n, 2], (slot, ticket) of what a tier keeps.
        release: int32 [n], slots to free.
        fork: int32 [n, 2], (slot, new slot).
        swap_in: int32 [n, 3], (slot, ticket, tokens) of what comes back from a tier.
        stop: whether the plan is the lane's last.
        whole: all its rows as one piece.
        pieces: the same, as they are exchanged; none if it has no rows.
    """

    def __init__(self, plan: Plan, rank: int, first_slot: int = 0, count: int = 1):
        rows = np.flatnonzero(plan.decode[:, 0] == rank)
        prefill = _own(plan.prefill, rank, first_slot)
        self.swap_out, self.swap_in = _own(plan.swap_out, rank, first_slot), _own(plan.swap_in, rank, first_slot)
        self.truncate = _own(plan.truncate, rank, first_slot)
        self.stop = plan.stop
        self.release: Slots = _own(plan.release, rank, first_slot)[:, 0]
        self.fork = _own(plan.fork, rank, first_slot, 2)
        decode_slots, decode_counts = _runs(plan.decode[rows, 1] + first_slot)
        self.whole = Piece(
            decode_slots,
            decode_counts,
            rows,
            np.ascontiguousarray(prefill[:, 0]),
            np.ascontiguousarray(prefill[:, 2]),
            _stretches(prefill),
        )
        self.pieces = list(_pieces(self.whole, min(count, len(decode_slots))))
        self._stateful: list[Piece] | None = None

    def pieces_of(self, shape: MixerShape) -> list[Piece]:
        """Return the pieces of a layer of `shape`; where it keeps a state, prompts go on as decode rows do."""
        if isinstance(shape, LayerShape):
            return self.pieces
        if self._stateful is None:
            self._stateful = [_stateful(piece) for piece in self.pieces]
        return self._stateful


def _own(table: Slots, rank: int, first_slot: int, slots: int = 1) -> Slots:
    """Return a copy of the rows that are an R-rank's, without its number; the first columns are slots of its lane."""
    if not len(table):
        return np.empty((0, table.shape[1] - 1), np.int32)
    own = table[table[:, 0] == rank, 1:]
    own[:, :slots] += first_slot
    return own


def _runs(slots: Slots) -> tuple[Slots, Slots]:
    """Return slots that each follow themselves in a row once, and how often they do, int32 [n] each."""
    first = np.ones(len(slots), np.bool_)
    np.not_equal(slots[1:], slots[:-1], out=first[1:])
    if first.all():
        return slots, np.ones(len(slots), np.int32)
    begins = np.flatnonzero(first)
    return slots[begins], np.diff(begins, append=len(slots)).astype(np.int32)


def _stretches(prefill: Slots) -> NDArray[np.int64]:
    """Return the rows in the lane of prompts: (slot, first row, tokens) of each."""
    stretches = [np.arange(first, first + tokens) for _, first, tokens in prefill.tolist()]
    return np.concatenate(stretches) if stretches else np.empty(0, np.int64)


def _pieces(whole: Piece, count: int) -> Iterator[Piece]:
    """Yield sequences that decode in `count` even pieces, the prompts with the last."""
    decodes = len(whole.decode_slots)
    if not decodes + len(whole.prefill_rows):
        return
    if count <= 1:
        yield whole
        return
    rows = np.concatenate([[0], np.cumsum(whole.decode_counts)])
    for start, end in pairwise(np.linspace(0, decodes, count + 1).astype(int).tolist()):
        decode, prefill = slice(start, end), slice(None if end == decodes else 0)
        yield Piece(
            whole.decode_slots[decode],
            whole.decode_counts[decode],
            whole.decode_rows[rows[start] : rows[end]],
            whole.prefill_slots[prefill],
            whole.prefill_counts[prefill],
            whole.prefill_rows[prefill],
        )


def _stateful(piece: Piece) -> Piece:
    """Return a piece whose prompts are among its decode rows."""
    none = piece.prefill_slots[:0]
    return Piece(
        np.concatenate([piece.decode_slots, piece.prefill_slots]),
        np.concatenate([piece.decode_counts, piece.prefill_counts]),
        np.concatenate([piece.decode_rows, piece.prefill_rows]),
        none,
        none,
        piece.prefill_rows[:0],
    )


def prompt_columns(shape: MixerShape) -> int:
    """Return the columns of a row of a prompt where prompts attend on the S-rank: those of k and v."""
    return shape.kv_columns if isinstance(shape, LayerShape) else 0
