"""Lane programs take turns: in rounds, or the lane first whose step is oldest."""

from __future__ import annotations

from hpcdecode.engine.programs import PlanOrder, serve
from hpcdecode.engine.rounds import LaneRounds
from hpcdecode.system.timeline import Timeline


class Now:
    def Test(self) -> bool:
        return True


def program(name, steps, turns, log):
    for step in range(steps):
        yield "idle", Now()
        for turn in range(turns):
            log.append((name, step, turn))
            yield "wait", Now()


def test_in_rounds_lanes_go_on_side_by_side():
    log = []
    serve([program("a", 1, 3, log), program("b", 1, 3, log)], Timeline())
    assert [name for name, *_ in log] == ["a", "b"] * 3


def test_the_oldest_step_goes_first():
    log = []
    serve([program("a", 2, 3, log), program("b", 2, 3, log)], Timeline(), oldest_first=True)
    assert [name for name, *_ in log] == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3


def test_what_comes_between_is_done_while_nothing_goes_on():
    calls = []

    class Later:
        def Test(self) -> bool:
            return len(calls) > 2

    def waits():
        yield "wait", Later()

    serve([waits()], Timeline(), lambda: calls.append(1))
    assert len(calls) > 2


def test_lanes_begin_their_steps_in_rounds():
    rounds = LaneRounds(3)
    turns = [rounds.turn(lane) for lane in range(3)]

    def may():
        return [turn.Test() for turn in turns]

    assert may() == [True, False, False]
    assert rounds.begin(0) == 0 and may() == [False, True, False]
    rounds.begin(1)
    rounds.begin(2)
    assert may() == [True, False, False] and rounds.begin(0) == 1
    rounds.leave(1)
    assert [turns[0].Test(), turns[2].Test()] == [False, True]


def test_plans_are_applied_in_their_order():
    order = PlanOrder()
    assert order.turn(0).Test() and not order.turn(1).Test()
    order.next = 1
    assert order.turn(1).Test()
