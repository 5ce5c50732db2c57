"""Lanes over copies of a model, by each route, on all ranks that this module is started on: see `bench/routes.py`.

The S-rank that is the lead prints a list of RoutedRun as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean

import msgspec

from hpcdecode.config import EngineOptions
from hpcdecode.engine.weight_facts import weight_facts
from hpcdecode.planning.steady_engine import SteadyEngine
from hpcdecode.planning.steady_load import OperationSeconds, SteadyLoad
from hpcdecode.ranks import launch
from hpcdecode.ranks.team import assemble

_TRIALS = 3  # before a context is chosen
_CONTEXTS = 16, 4096  # the shortest and the longest
_SLICE, _WAITS = ("slice", "post", "take"), ("wait", "idle")


class RoutedRun(msgspec.Struct, frozen=True):
    """One measurement of one route; seconds are those of a step.

    Attributes:
        route: Of the lanes.
        balance: Wanted ratio of a slice's seconds to those of its attention.
        context: Tokens of every sequence.
        lanes: Of a group.
        groups: Number of groups; a rotation is one.
        step: Seconds of a step.
        way: Of a step with one lane a group.
        slices: Of all slices of one lane.
        attention: Of all attention of one lane.
        home: Of what home does for one lane beside its slices.
        busy: Share of the step in which an S-rank works, the mean.
    """

    route: str
    balance: float
    context: int
    lanes: int
    groups: int
    step: float
    way: float
    slices: float
    attention: float
    home: float
    busy: float


class _Route:
    """A route's engine on all ranks; every rank makes the same calls."""

    def __init__(self, model: str, route: str, copies: int, batch: int, steps: int):
        comm = launch.connect()
        options = EngineOptions(model=model, dtype="bfloat16", layout="split", s_ranks=copies, route=route)
        self.team = assemble(comm, options.wishes, weights=weight_facts(options))
        self.team.pin()
        self.engine = SteadyEngine(options, self.team)
        self.route, self.copies, self.batch, self.steps = route, copies, batch, steps

    def run(self, balance: float, context: int, lanes: int, way: float = 0.0) -> RoutedRun:
        """Measure lanes with sequences of one context."""
        ranks = self.engine.steady(SteadyLoad(lanes * self.batch, lanes, context, self.steps))
        team = self.team
        s, r = ([ranks[place] for place in places] for places in (team.s_ranks, team.r_ranks))
        homes = [ranks[place] for place in team.homes]
        of_lanes = lanes * len(homes)
        step = fmean(home["step"] for home in homes)
        return RoutedRun(
            self.route,
            balance,
            context,
            lanes,
            len(homes),
            step,
            way or step,
            slices=sum(_spent(own, _SLICE) for own in s) / of_lanes,
            attention=max(_busy(own) for own in r) / of_lanes,
            home=sum(_busy(home) - _spent(home, _SLICE) for home in homes) / of_lanes,
            busy=fmean(_busy(own) / own["step"] for own in s),
        )

    def balanced(self, balance: float) -> int:
        """Return the context at which the slices of a lane take `balance` times as long as its attention."""
        context = 128
        for _ in range(_TRIALS):
            found = self.run(balance, context, 1)
            wanted = context * found.slices / (balance * found.attention)
            context = self.team.broadcast(int(min(max(wanted, _CONTEXTS[0]), _CONTEXTS[1])), int)
        return context


def _busy(own: OperationSeconds) -> float:
    return own["step"] - _spent(own, _WAITS)


def _spent(own: OperationSeconds, operations: tuple[str, ...]) -> float:
    return sum(own.get(o, 0.0) for o in operations)


def main(
    model: str, copies: int, lanes: int, batch: int, steps: int, passes: int, balances: Sequence[float]
) -> list[RoutedRun]:
    """Measure both routes in turn at each balance; return that on the lead, nothing on other ranks."""
    rotational, fixed = (_Route(model, route, copies, batch, steps) for route in ("rotational", "fixed"))
    contexts = [rotational.balanced(balance) for balance in balances]
    found = []
    for _ in range(passes):
        for balance, context in zip(balances, contexts, strict=True):
            for route, count in ((rotational, lanes), (fixed, 2), (fixed, 1)):
                way = route.run(balance, context, 1).step
                found.append(route.run(balance, context, count, way))
    return found if rotational.team.lead else []


if __name__ == "__main__":
    copies, lanes, batch, steps, passes = map(int, sys.argv[2:7])
    runs = main(sys.argv[1], copies, lanes, batch, steps, passes, [float(x) for x in sys.argv[7:]])
    if runs:
        print(msgspec.json.encode(runs).decode())
