"""The R-rank: attends what arrives, lane by lane, in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq

from hpcdecode.exchange.mpi import MpiRLink
from hpcdecode.exchange.wait import Backoff, Request
from hpcdecode.workers.r_part import RPart

Program = Generator[Request, None, None]


class Turns:
    """Plans of one S-rank begin in the order in which it made them, whatever order they arrive in."""

    def __init__(self) -> None:
        self.next = 0


class _Turn:
    def __init__(self, turns: Turns, number: int):
        self.turns, self.number = turns, number

    def Test(self) -> bool:
        return self.turns.next == self.number


def lane_program(link: MpiRLink, part: RPart, turns: Turns) -> Program:
    """Serve one lane until its stop plan; yields each request that it must wait for."""
    while True:
        yield link.receive_plan()
        plan = link.plan()
        yield _Turn(turns, plan.number)
        turns.next += 1
        part.begin(link.share)
        if plan.stop:
            return
        if not plan.runs_model:
            continue
        for layer in range(len(link.shapes)):
            yield link.receive_rows(layer)
            rows, prompts, out = link.rows(layer)
            part.attend(layer, link.share, rows, prompts, out)
            if plan.decode_tokens:
                link.send(out)


def serve(programs: Seq[Program], check: Callable[[], None]) -> None:
    """Run the lanes' programs to their end; `check` is called while idle and may raise."""
    waiting = {program: next(program) for program in programs}
    backoff = Backoff()
    while waiting:
        progressed = False
        for program, request in list(waiting.items()):
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
            check()
            backoff.pause()
