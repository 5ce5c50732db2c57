"""A lane of an R-rank: it attends what comes; its lanes take turns in the order of arrival."""

from __future__ import annotations

from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.programs import PlanOrder, Program
from hpcdecode.exchange.mpi import MpiRLink


def lane_program(lane: int, link: MpiRLink, worker: AttentionWorker, order: PlanOrder) -> Program:
    """Serve one lane until its stop plan; yield each request that it must wait for."""
    while True:
        yield "idle", link.recv_plan()
        plan = link.take_plan()
        yield "idle", order.turn(plan.number)
        order.next += 1
        worker.apply(lane, link.share)
        if plan.stop:
            return
        if not link.share.pieces:
            continue
        for layer in range(len(link.shapes)):
            for request, message in link.recv_qkv(layer):
                yield "wait", request
                link.take_qkv()
                if mark := worker.attend(lane, layer, message.piece, message.rows, message.prompts, message.out):
                    yield "wait", mark
                worker.timeline.enter("post", lane)
                link.send_output(message)
