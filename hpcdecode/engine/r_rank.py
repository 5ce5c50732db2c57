"""The loop of an R-rank: it attends what comes, lane by lane, in the order of arrival."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.exchange.mpi import MpiRLink
from hpcdecode.mpi.wait import Backoff, Waitable
from hpcdecode.system.timeline import Timeline

Program = Generator[tuple[str, Waitable], None, None]  # what it waits in (wait or idle), and for what


class PlanOrder:
    """Plans of one S-rank are applied in the order in which it made them, whatever order they come in.

    Attributes:
        next: number of the plan to apply next.
    """

    def __init__(self) -> None:
        self.next = 0


class _Turn:
    """Is done when plan `number` is next."""

    def __init__(self, order: PlanOrder, number: int):
        self.order, self.number = order, number

    def Test(self) -> bool:
        return self.order.next == self.number


def lane_program(lane: int, link: MpiRLink, worker: AttentionWorker, order: PlanOrder) -> Program:
    """Serve one lane until its stop plan; yield each request that it must wait for."""
    while True:
        yield "idle", link.recv_plan()
        plan = link.take_plan()
        yield "idle", _Turn(order, plan.number)
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


def serve(programs: Sequence[Program], timeline: Timeline) -> None:
    """Run the lanes' programs to their end."""
    waiting = {program: next(program) for program in programs}
    backoff, idling = Backoff(), False
    while waiting:
        progressed = False
        for program, (_, request) in list(waiting.items()):
            if not request.Test():
                continue
            progressed = True
            following = next(program, None)
            if following is None:
                del waiting[program]
            else:
                waiting[program] = following
        if progressed:
            backoff.reset()
        else:
            if not idling:
                timeline.enter("wait" if any(why == "wait" for why, _ in waiting.values()) else "idle")
            backoff.pause()
        idling = not progressed
    timeline.enter("other")
