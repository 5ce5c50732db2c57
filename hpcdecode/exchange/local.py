"""Both roles in one process: the S-rank's rows go straight to the attention, no message passing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from hpcdecode.attention.base import LayerRows
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange.base import Attention, OnlyEnd, Piece, Share, joined
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan


class PieceRows(NamedTuple):
    """The rows of a piece: of decodes [n, row_columns] and of prompts [m, kv_columns], and the output [n, out_columns].

    Attributes:
        piece: whose rows they are.
        decodes: as `Attention.attend` takes them.
        prompts: as `Attention.attend` takes them.
        out: of the decode rows.
    """

    piece: Piece
    decodes: Tensor
    prompts: Tensor
    out: Tensor


class LocalLink(OnlyEnd):
    """A lane whose only R-rank is this process.

    Args:
        attention: of this process.
        lane: index of the lane.
        first_slot: of the KV cache, the first that is the lane's.

    Attributes:
        share: what the plan of the lane's step asks of the R-rank.
    """

    def __init__(self, attention: Attention, lane: int, first_slot: int):
        self.attention, self.lane, self.first_slot = attention, lane, first_slot
        self.share: Share | None = None
        self._under_way: list[tuple[Waitable, Tensor, Tensor]] = []  # on a device that attends later, and what it reads

    def send_plan(self, plan: Plan) -> None:
        """Let the attention apply the plan."""
        self.share = Share(plan, 0, self.first_slot)
        self.attention.apply(self.lane, self.share)

    def answers_prompts(self, layer: int) -> bool:
        """Return whether the layer keeps a state."""
        return not isinstance(self.attention.kv_cache.layers[layer], LayerShape)

    def send_rows(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Attend now, or tell a device to."""
        for piece in self._pieces(layer, rows, o):
            mark = self.attention.attend(self.lane, layer, *piece)
            if mark:
                self._under_way.append((mark, piece.decodes, piece.prompts))

    def rows_beside(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> LayerRows | None:
        """Return what `send_rows` would do, for prompt attention to do beside its own work; None if it is nothing."""
        pieces = list(self._pieces(layer, rows, o))
        return self.attention.rows_beside(layer, *pieces[0]) if pieces else None

    def _pieces(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> Iterator[PieceRows]:
        """Yield the rows of each piece of the share, of which there is one at most."""
        assert self.share is not None, "send_rows: expected a plan first"
        for piece in self.share.pieces_of(self.attention.kv_cache.layers[layer]):
            n = len(piece.decode_rows)
            decodes = joined(*(x[:n] for x in rows))
            prompts = joined(*(x[n:] for x in rows[1:])) if n < len(rows[0]) else decodes[:0]
            yield PieceRows(piece, decodes, prompts, o[:n])

    def Test(self) -> bool:
        """Return whether nothing is under way on a device."""
        self._under_way = [work for work in self._under_way if not work[0].Test()]
        return not self._under_way

    def recv_output(self) -> None:
        """Do nothing: the attention wrote o in place."""

    def take_swapped(self) -> list[tuple[int, bool]]:
        """Return what came of tickets."""
        return self.attention.take_swapped(self.lane)

    def close(self) -> None:
        """Do nothing: there is no connection."""
