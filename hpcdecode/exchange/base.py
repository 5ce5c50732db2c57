"""What crosses between an S-rank and its R-ranks, and in which order.

One link is one lane. Per layer with attention the S-rank sends each R-rank its decode rows [q | k | v] and its prefill
rows [k | v], in one or several pieces. It receives the decode rows of the attention output o back, piece by piece. A
layer that keeps a state gets whole rows of all tokens, prompts too, and answers them all. Both sides derive pieces and
sizes from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpcdecode.attention.base import KvCache, LayerRows
from hpcdecode.attention.shapes import MixerShape
from hpcdecode.exchange.partition import RankColumns
from hpcdecode.exchange.shares import Piece, Share
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan


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
