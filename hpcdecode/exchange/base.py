"""What crosses between an S-rank and its R-ranks, and in which order.

One link is one lane. Per layer the S-rank sends each R-rank its decode rows [q | k | v] and its prefill rows
[k | v], in one or several pieces, and receives the decode rows of the attention output o back, piece by piece. Both
sides derive pieces and sizes from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention.base import LayerShape
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan


class SLink(Protocol):
    """The S-rank's end of a lane."""

    def begin(self, plan: Plan) -> None:
        """Announce the plan of the lane's next step."""

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """Start the attention of `layer` over the lane's rows: q [T, Hq*Dk], k [T, Hkv*Dk], v [T, Hkv*Dv].

        The decode rows of o [T, Hq*Dv], which come first, are valid after `take`; the others are the caller's.
        """

    def done(self) -> bool:
        """Whether the R-ranks have done what was posted last."""

    def wait(self) -> None:
        """Return when they have."""

    def take(self) -> None:
        """Put o where `post` was told to."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Sequences of a share that are exchanged and attended together: slots and counts as the KV store takes them.

    decode_rows, prefill_rows: int64 [n], their rows in the lane.
    """

    decode_slots: np.ndarray
    decode_counts: np.ndarray
    decode_rows: np.ndarray
    prefill_slots: np.ndarray
    prefill_counts: np.ndarray
    prefill_rows: np.ndarray

    def elements(self, shape: LayerShape) -> int:
        """Elements that the R-rank receives for one layer."""
        return len(self.decode_rows) * shape.row_columns + len(self.prefill_rows) * shape.kv_columns


class Share:
    """One R-rank's part of a plan: what it does to its slots, and its rows of every layer in at most `count` pieces."""

    def __init__(self, plan: Plan, rank: int, first_slot: int = 0, count: int = 1):
        decode = plan.decode[plan.decode[:, 0] == rank, 1] + first_slot
        prefill = plan.prefill[plan.prefill[:, 0] == rank, 1:]
        self.release = plan.release[plan.release[:, 0] == rank, 1] + first_slot
        self.fork = plan.fork[plan.fork[:, 0] == rank, 1:] + first_slot  # rows (slot, new slot)
        stretches = [np.arange(first, first + tokens) for first, tokens in prefill[:, 1:].tolist()]
        self.whole = Piece(
            decode,
            np.ones(len(decode), np.int32),
            np.flatnonzero(plan.decode[:, 0] == rank),
            prefill[:, 0] + first_slot,
            np.ascontiguousarray(prefill[:, 2]),
            np.concatenate([np.empty(0, np.int64), *stretches]),
        )
        self.pieces = list(_pieces(self.whole, min(count, len(decode))))


def _pieces(whole: Piece, count: int) -> Iterator[Piece]:
    """Decode rows in `count` even pieces, the prompts with the last."""
    decodes = len(whole.decode_rows)
    if not decodes + len(whole.prefill_rows):
        return
    for start, end in pairwise(np.linspace(0, decodes, max(count, 1) + 1).astype(int).tolist()):
        decode, prefill = slice(start, end), slice(None if end == decodes else 0)
        yield Piece(
            *(column[decode] for column in (whole.decode_slots, whole.decode_counts, whole.decode_rows)),
            *(column[prefill] for column in (whole.prefill_slots, whole.prefill_counts, whole.prefill_rows)),
        )


class Part(Protocol):
    """An R-part as a link drives it: see `workers.r_part.AttentionWorker`."""

    def begin(self, lane: int, share: Share) -> None: ...

    def attend(
        self, lane: int, layer: int, piece: Piece, rows: Tensor, prompts: Tensor, out: Tensor
    ) -> Waitable | None: ...


def joined(*parts: Tensor) -> Tensor:
    """The columns of `parts` as one matrix."""
    view = side_by_side(*parts)
    return torch.cat(parts, dim=1) if view is None else view


def side_by_side(*parts: Tensor) -> Tensor | None:
    """A view of `parts` as one matrix where their columns lie side by side, as slices leave them; else None."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.stride() != first.stride():
            return None
        end += part.shape[1] * part.element_size()
    return first.as_strided((len(first), sum(part.shape[1] for part in parts)), first.stride())
