"""The R-rank: attends what arrives, lane by lane, in the order of arrival."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.exchange.mpi import MpiRLink
from hpcdecode.mpi.wait import Backoff, Waitable
from hpcdecode.system.timeline import Timeline

Program = Generator[tuple[str, Waitable], None, None]  # what it waits in (wait or idle), and for what


class Turns:
    """Plans of one S-rank begin in the order in which it made them, whatever order they arrive in."""

    def __init__(self) -> None:
        self.next = 0


class _Turn:
    def __init__(self, turns: Turns, number: int):
        self.turns, self.number = turns, number

    def Test(self) -> bool:
        return self.turns.next == self.number


def lane_program(lane: int, link: MpiRLink, part: AttentionWorker, turns: Turns) -> Program:
    """Serve one lane until its stop plan; yields each request that it must wait for."""
    while True:
        yield "idle", link.receive_plan()
        plan = link.plan()
        yield "idle", _Turn(turns, plan.number)
        turns.next += 1
        part.begin(lane, link.share)
        if plan.stop:
            return
        if not link.share.pieces:
            continue
        for layer in range(len(link.shapes)):
            for request, parcel in link.receive(layer):
                yield "wait", request
                link.opened()
                if mark := part.attend(lane, layer, parcel.piece, parcel.rows, parcel.prompts, parcel.out):
                    yield "wait", mark
                part.timeline.enter("post", lane)
                link.send(parcel)


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
