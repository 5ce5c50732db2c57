"""A lane of an R-rank: it attends what comes; its lanes take turns in the order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.programs import PlanOrder, Program
from hpcdecode.exchange.mpi import MpiRLink
from hpcdecode.schedule.plan import Plan


class PlansApart:
    """Plans of prompts that come from ranks that only prefill, from when they are applied until their rows come."""

    def __init__(self) -> None:
        self._plans: deque[Plan] = deque()
        self._closed = False

    def put(self, plan: Plan) -> None:
        """Append a plan."""
        self._plans.append(plan)

    def take(self) -> Plan | None:
        """Return the next plan, once `Test` has said that there is one; None after the last."""
        return self._plans.popleft() if self._plans else None

    def close(self) -> None:
        """End after those that there are."""
        self._closed = True

    def Test(self) -> bool:
        """Return whether there is a plan, or none will be."""
        return bool(self._plans) or self._closed


def programs_of(
    lane: int,
    ends: Sequence[MpiRLink],
    worker: AttentionWorker,
    order: PlanOrder,
    copy: Callable[[int], int],
    prefill: int | None,
) -> list[Program]:
    """Return the programs of a lane: a second one if ranks prefill its prompts that do nothing else.

    Args:
        lane: of this rank, for the timeline.
        ends: of the lane, one to each copy of the model.
        worker: attends.
        order: of the plans of the lane's group.
        copy: returns the copy that runs a slice of the lane, given the slice's number.
        prefill: copy that prefills, or None.
    """
    if prefill is None:
        return [lane_program(lane, ends, worker, order, copy)]
    apart = PlansApart()
    prompts = prompt_program(lane, ends[prefill], worker, apart)
    return [lane_program(lane, ends[:1], worker, order, copy, apart), prompts]


def lane_program(
    lane: int,
    ends: Sequence[MpiRLink],
    worker: AttentionWorker,
    order: PlanOrder,
    copy: Callable[[int], int] = lambda _: 0,
    apart: PlansApart | None = None,
) -> Program:
    """Serve one lane until its stop plan; yield each request that it must wait for.

    Args:
        lane: of this rank, for the timeline.
        ends: of the lane, one to each copy of the model.
        worker: attends.
        order: of the plans of the lane's group.
        copy: returns the copy that runs a slice of the lane, given the slice's number.
        apart: takes the plans whose rows come from ranks that only prefill, if there are any.
    """
    home, *others = ends
    while True:
        yield "idle", home.recv_plan()
        plan = home.take_plan()
        for end in others:
            end.follow_plan(plan)
        assert apart is not None or not plan.apart, "expected ranks that only prefill"
        yield "idle", order.turn(plan.number)
        order.next += 1
        worker.apply(lane, home.share)
        if apart is not None and plan.apart:
            apart.put(plan)
            continue
        if plan.stop:
            home.tell_swapped(worker.take_swapped(lane))
            if apart is not None:
                apart.close()
            return
        yield from _layers(lane, ends, worker, copy)


def prompt_program(lane: int, end: MpiRLink, worker: AttentionWorker, plans: PlansApart) -> Program:
    """Append K and V of a lane's prompts that a rank prefills which does nothing else, to the end of the plans.

    Args:
        lane: of this rank, for the timeline.
        end: of the lane, to that rank.
        worker: appends.
        plans: that were applied.
    """
    while True:
        yield "idle", plans
        plan = plans.take()
        if plan is None:
            return
        end.follow_plan(plan)
        yield from _layers(lane, [end], worker, lambda _: 0)


def _layers(lane: int, ends: Sequence[MpiRLink], worker: AttentionWorker, copy: Callable[[int], int]) -> Program:
    """Attend to the rows of a plan, layer by layer."""
    if not ends[0].share.pieces:
        return
    for layer in range(len(ends[0].shapes)):
        source, target = ends[copy(layer)], ends[copy(layer + 1)]
        for (request, message), answer in zip(source.recv_rows(layer), target.messages(layer), strict=True):
            yield "wait", request
            if mark := worker.attend(lane, layer, message.piece, message.rows, message.prompts, answer.out):
                yield "wait", target.while_waiting(mark)
            worker.timeline.enter("post", lane)
            target.send_output(answer)


def tell_swapped(ends: Sequence[MpiRLink], worker: AttentionWorker) -> None:
    """Tell S-ranks what has come back from tiers; ends: to the homes of all lanes."""
    for lane, home in enumerate(ends):
        home.tell_swapped(worker.take_swapped(lane))
