"""A lane of an R-rank: it attends what comes; its lanes take turns in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.programs import PlanOrder, Program
from hpcdecode.exchange.mpi import MpiRLink


def lane_program(
    lane: int,
    ends: Sequence[MpiRLink],
    worker: AttentionWorker,
    order: PlanOrder,
    copy: Callable[[int], int] = lambda _: 0,
) -> Program:
    """Serve one lane until its stop plan; yield each request that it must wait for.

    Args:
        lane: of this rank, for the timeline.
        ends: of the lane, one to each copy of the model.
        worker: attends.
        order: of the plans of the lane's group.
        copy: returns the copy that runs a slice of the lane, given the slice's number.
    """
    home, *others = ends
    while True:
        yield "idle", home.recv_plan()
        plan = home.take_plan()
        for end in others:
            end.follow_plan(plan)
        yield "idle", order.turn(plan.number)
        order.next += 1
        worker.apply(lane, home.share)
        if plan.stop:
            return
        if not home.share.pieces:
            continue
        for layer in range(len(home.shapes)):
            source, target = ends[copy(layer)], ends[copy(layer + 1)]
            for (request, message), answer in zip(source.recv_rows(layer), target.messages(layer), strict=True):
                yield "wait", request
                source.take_rows()
                if mark := worker.attend(lane, layer, message.piece, message.rows, message.prompts, answer.out):
                    yield "wait", mark
                worker.timeline.enter("post", lane)
                target.send_output(answer)
