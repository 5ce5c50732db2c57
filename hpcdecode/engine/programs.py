"""Lane programs: generators that yield what they must wait for, so that one rank runs several in turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import perf_counter
from typing import TypeVar

from hpcdecode.mpi.wait import Backoff, Waitable
from hpcdecode.system.timeline import Timeline

T = TypeVar("T")
Waiting = Generator[tuple[str, Waitable], None, T]  # what it waits in (wait or idle), and for what
Program = Waiting[None]
_DUTIES_SECONDS = 2e-3


class PlanOrder:
    """Plans of one S-rank are applied in the order in which it made them, whatever order they come in.

    Attributes:
        next: number of the plan to apply next.
    """

    def __init__(self) -> None:
        self.next = 0

    def turn(self, number: int) -> Waitable:
        """Return what is done when plan `number` is next."""
        return _Turn(self, number)


class _Turn:
    def __init__(self, order: PlanOrder, number: int):
        self.order, self.number = order, number

    def Test(self) -> bool:
        return self.order.next == self.number


def waiting(why: str, requests: Generator[Waitable, None, T]) -> Waiting[T]:
    """Yield what a generator yields as a lane program does; return what it returns.

    Args:
        why: `wait`, or `idle` if there is nothing to do before it comes.
        requests: yields what to wait for.
    """
    try:
        while True:
            yield why, next(requests)
    except StopIteration as end:
        result: T = end.value
        return result


def serve(
    programs: Sequence[Program],
    timeline: Timeline,
    between: Callable[[], None] | None = None,
    *,
    oldest_first: bool = False,
) -> None:
    """Run the lanes' programs to their end.

    Args:
        programs: by lane.
        timeline: of this rank.
        between: called after every round in which a lane went on, and now and then while none does.
        oldest_first: whether lanes go on in the order in which their steps began, else in rounds. So lanes follow each
            other through the stages of a group, where in rounds they would all be in the same stage.
    """
    waiting = {program: first for program in programs if (first := next(program, None)) is not None}
    backoff, idling, due = Backoff(), False, 0.0
    while waiting:
        progressed = False
        for program, (_, request) in list(waiting.items()):
            if not request.Test():
                continue
            progressed = True
            following = next(program, None)
            if following is None:
                del waiting[program]
                continue
            if following[0] == "idle":  # its step has ended
                del waiting[program]
            waiting[program] = following
            if oldest_first:
                break
        if between and (progressed or perf_counter() > due):
            between()
            due = perf_counter() + _DUTIES_SECONDS
            idling = False
        if progressed:
            backoff.reset()
            idling = False
            continue
        if not idling:
            timeline.enter("wait" if any(why == "wait" for why, _ in waiting.values()) else "idle")
        idling = True
        backoff.pause()
    timeline.enter("other")
