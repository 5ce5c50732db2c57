"""What crosses between an S-rank and its R-ranks, and in which order.

One link is one lane. Per layer with attention the S-rank sends each R-rank its decode rows [q | k | v] and its prefill
rows [k | v], in one or several pieces. It receives the decode rows of the attention output o back, piece by piece. A
layer that keeps a state gets whole rows of all tokens, prompts too, and answers them all. Both sides derive pieces and
sizes from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import KvCache, LayerRows
from hpcdecode.attention.shapes import LayerShape, MixerShape
from hpcdecode.exchange.partition import RankColumns
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan

Slots = NDArray[np.int32]


class SLink(Protocol):
    """The S-rank's end of a lane.

    S-ranks that run a lane in turn have an end each: the answer to what one has sent goes to the next.
    """

    def send_plan(self, plan: Plan) -> None:
        """Announce the plan of the lane's next step."""

    def answers_prompts(self, layer: int) -> bool:
        """Return whether R-ranks answer rows of prompts at `layer`, as they do if it keeps a state."""

    def send_rows(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Start the attention or recurrence of `layer` over the lane's rows.

        Args:
            layer: index of the layer.
            rows: q, k and v [T, columns], decode rows first; or what a token brings to a layer that keeps a state.
            o: [T, out_columns]; the rows that R-ranks answer are valid after `recv_output`, the others, those of
                prompts, are the caller's.
        """

    def follow_plan(self, plan: Plan) -> None:
        """Take a plan that another S-rank's end of the lane announces."""

    def send_away(self, layer: int, rows: Sequence[Tensor]) -> None:
        """Start what `send_rows` starts; another S-rank expects its output."""

    def expect_output(self, layer: int, o: Tensor) -> None:
        """Expect the output of what another S-rank starts, as `send_rows` does for its own."""

    def Test(self) -> bool:
        """Return whether the R-ranks have done what was sent last."""

    def recv_output(self) -> None:
        """Put the rows that R-ranks answer where `send_rows` was told to."""

    def take_swapped(self) -> list[tuple[int, bool]]:
        """Return the tickets of `Plan.swap_in` that R-ranks have dealt with since, and whether all is back."""

    def close(self) -> None:
        """Complete what is under way after the stop plan."""


class OnlyEnd:
    """What the ends of lanes have in common whose S-rank is the only one."""

    def take_swapped(self) -> list[tuple[int, bool]]:
        """Return nothing: nothing comes back from tiers."""
        return []

    def follow_plan(self, plan: Plan) -> None:
        """Raise NotImplementedError: the S-rank is the only one."""
        raise NotImplementedError("the lane has one S-rank")

    def send_away(self, layer: int, rows: Sequence[Tensor]) -> None:
        """Raise NotImplementedError: the S-rank is the only one."""
        raise NotImplementedError("the lane has one S-rank")

    def expect_output(self, layer: int, o: Tensor) -> None:
        """Raise NotImplementedError: the S-rank is the only one."""
        raise NotImplementedError("the lane has one S-rank")


@dataclass(frozen=True, slots=True)
class Piece:
    """Sequences of a share that are exchanged and attended together.

    Attributes:
        decode_slots, decode_counts: int32 [n], as `KvCache.attend` takes them; every count is 1, but for layers that
            keep a state, where prompts are among them.
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
        self.stop = plan.stop
        self.release: Slots = _own(plan.release, rank, first_slot)[:, 0]
        self.fork = _own(plan.fork, rank, first_slot, 2)
        self.whole = Piece(
            plan.decode[rows, 1] + first_slot,
            np.ones(len(rows), np.int32),
            rows,
            np.ascontiguousarray(prefill[:, 0]),
            np.ascontiguousarray(prefill[:, 2]),
            _stretches(prefill),
        )
        self.pieces = list(_pieces(self.whole, min(count, len(rows))))
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


def _stretches(prefill: Slots) -> NDArray[np.int64]:
    """Return the rows in the lane of prompts: (slot, first row, tokens) of each."""
    stretches = [np.arange(first, first + tokens) for _, first, tokens in prefill.tolist()]
    return np.concatenate(stretches) if stretches else np.empty(0, np.int64)


def _pieces(whole: Piece, count: int) -> Iterator[Piece]:
    """Yield decode rows in `count` even pieces, the prompts with the last."""
    decodes = len(whole.decode_rows)
    if not decodes + len(whole.prefill_rows):
        return
    if count <= 1:
        yield whole
        return
    for start, end in pairwise(np.linspace(0, decodes, count + 1).astype(int).tolist()):
        decode, prefill = slice(start, end), slice(None if end == decodes else 0)
        yield Piece(
            whole.decode_slots[decode],
            whole.decode_counts[decode],
            whole.decode_rows[decode],
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


class PackedRows(NamedTuple):
    """The memory of a piece of one layer.

    Attributes:
        piece: Whose rows they are.
        columns: That the R-rank has; None for all.
        sent: [n], decode rows and prefill rows, to the R-rank.
        answered: [m], output, back.
    """

    piece: Piece
    columns: RankColumns | None
    sent: Tensor
    answered: Tensor


class Parcel(Protocol):
    """What is sent at once, to one R-rank or several."""

    @property
    def packed(self) -> Sequence[PackedRows]:
        """Return the memory that is sent, and that of the answers, in the order of packing."""


class ParcelLink(SLink, Protocol):
    """An S-rank's end of a lane whose memory a device fills, parcel by parcel."""

    @property
    def shapes(self) -> Sequence[MixerShape]:
        """Return the shapes of whole layers."""

    def parcels(self, layer: int, dtype: torch.dtype) -> Sequence[Parcel]:
        """Return what is sent for a layer of the plan, in the order of sending; the same for layers of one shape.

        Args:
            layer: index of the layer.
            dtype: of rows and outputs.
        """

    def begin(self, layer: int) -> None:
        """Take up a layer, once its memory may be filled."""

    def expect(self, parcel: Parcel) -> None:
        """Expect the answer to a parcel."""

    def send(self, parcel: Parcel) -> None:
        """Send a parcel, whose memory is filled."""

    def exchange(self, parcel: Parcel) -> None:
        """Do both."""

    def take_answers(self) -> None:
        """Make the answers that have come visible to this rank."""

    def poke(self) -> None:
        """Let what is under way go on."""


def prompt_columns(shape: MixerShape) -> int:
    """Return the columns of a row of a prompt where prompts attend on the S-rank: those of k and v."""
    return shape.kv_columns if isinstance(shape, LayerShape) else 0


class Attention(Protocol):
    """The attention of an R-rank as a link drives it: see `engine.attention_worker.AttentionWorker`."""

    @property
    def kv_cache(self) -> KvCache:
        """Return what it attends over."""

    def apply(self, lane: int, share: Share) -> None:
        """Free slots and make room as the share says."""

    def attend(
        self, lane: int, layer: int, piece: Piece, rows: Tensor, prompts: Tensor, out: Tensor
    ) -> Waitable | None:
        """Append K and V, and attend."""

    def rows_beside(self, layer: int, piece: Piece, rows: Tensor, prompts: Tensor, out: Tensor) -> LayerRows:
        """Return what `attend` would do, for prompt attention to do beside its own work."""

    def take_swapped(self, lane: int) -> list[tuple[int, bool]]:
        """Return what a lane's `swap_in` came to."""


def joined(*parts: Tensor) -> Tensor:
    """Return the columns of `parts` as one matrix."""
    view = side_by_side(*parts)
    return torch.cat(parts, dim=1) if view is None else view


def side_by_side(*parts: Tensor) -> Tensor | None:
    """Return a view of `parts` as one matrix if their columns lie side by side in memory, else None."""
    first, columns = parts[0], 0
    end, strides, size = first.data_ptr(), first.stride(), first.element_size()
    for part in parts:
        if part.shape[1] == 0:
            continue
        if part.data_ptr() != end or part.stride() != strides:
            return None
        width = part.shape[1]
        columns += width
        end += width * size
    return first.as_strided((first.shape[0], columns), strides)
