"""Both roles in one process: the S-rank's rows go straight to the R-part, no message passing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcdecode.exchange.base import Part, Share, SLink, joined
from hpcdecode.model import SplitModel
from hpcdecode.model.run.fused_step import FusedStep
from hpcdecode.mpi.wait import Waitable, wait
from hpcdecode.schedule.plan import Plan


def walk_over(model: SplitModel, links: Sequence[SLink]) -> FusedStep | None:
    """The walk of a lane that is the only one, and whose R-part is this process; None where there is none."""
    alone = len(links) == 1 and isinstance(links[0], LocalLink)
    return FusedStep.of(model, links[0].part.store) if alone else None


class LocalLink:
    """A lane whose only R-rank is this process."""

    def __init__(self, part: Part, lane: int, first_slot: int):
        self.part, self.lane, self.first_slot = part, lane, first_slot
        self._under_way: list[tuple[Waitable, Tensor, Tensor]] = []  # on a device that attends later, and what it reads

    def begin(self, plan: Plan) -> None:
        self.share = Share(plan, 0, self.first_slot)
        self.part.begin(self.lane, self.share)

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        for piece in self.share.pieces:
            n = len(piece.decode_rows)
            rows, prompts = joined(q[:n], k[:n], v[:n]), joined(k[n:], v[n:])
            mark = self.part.attend(self.lane, layer, piece, rows, prompts, o[:n])
            if mark:
                self._under_way.append((mark, rows, prompts))

    def walk(
        self, walk: FusedStep, q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple]:
        """All attentions of a step without prompts, and the slices between; returns o and context of the last."""
        timeline = self.part.timeline
        o, context, seconds = walk.run(self.share.whole.decode_slots, joined(q, k, v), context)
        timeline.enter("attend", self.lane, since=seconds)
        return o, context

    def done(self) -> bool:
        self._under_way = [work for work in self._under_way if not work[0].Test()]
        return not self._under_way

    def wait(self) -> None:
        wait(self)

    def take(self) -> None:
        pass

    def Test(self) -> bool:
        return self.done()
