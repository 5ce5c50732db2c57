"""Both roles in one process: the S-rank's rows go straight to the attention, no message passing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange.base import Attention, OnlyEnd, Share, joined
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan


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
        assert self.share is not None, "send_rows: expected a plan first"
        for piece in self.share.pieces_of(self.attention.kv_cache.layers[layer]):
            n = len(piece.decode_rows)
            decodes = joined(*(x[:n] for x in rows))
            prompts = joined(*(x[n:] for x in rows[1:])) if n < len(rows[0]) else decodes[:0]
            mark = self.attention.attend(self.lane, layer, piece, decodes, prompts, o[:n])
            if mark:
                self._under_way.append((mark, decodes, prompts))

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
