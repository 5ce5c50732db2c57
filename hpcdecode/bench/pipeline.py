"""`mpiexec -n N hpcdecode bench pipeline`: steps of one lane and of two, against the two sides measured alone.

One S-rank, N - 1 R-ranks, each on cores of its own where there are enough. The context is chosen so that both sides
take about as long, unless --context is given. Passes of all settings alternate; figures are medians.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.workload import SHAPES, checkpoint, default_folder
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.planning.steady_load import OperationSeconds, SteadyLoad
from hpcdecode.ranks.team import assemble
from hpcdecode.report.benchmark import case, machine

if TYPE_CHECKING:
    from hpcdecode.planning.steady import Steady

_TRIALS = 4  # before a context is chosen
_TRIAL, _SHORTEST, _LONGEST = 256, 32, 8192  # contexts: the first that is tried, and what is chosen from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add("--batch", type=int, default=256, help="sequences in all lanes together (%(default)s)")
    add("--context", type=int, help="tokens of each (chosen so that S and R take as long)")
    add("--lanes", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    add("--overlap", type=int, nargs="+", default=[1], help="pieces of an R-rank's work in a layer (default: 1)")
    add("--messages", action="store_true", help="send activations as between hosts, not through shared memory")
    add("--steps", type=int, default=6, help="of a pass (%(default)s)")
    add("--passes", type=int, default=5)
    add("--model", choices=tuple(SHAPES), default="pipeline", help="checkpoint to make (%(default)s)")
    add("--work", type=Path, default=default_folder(), metavar="DIR", help="checkpoints (%(default)s)")


def run(args: argparse.Namespace) -> Report | None:
    """Measure all settings; return the report on the S-rank, None on R-ranks.

    Raises:
        UserError: In a world of 1.
    """
    if args.comm is None:
        raise UserError("bench pipeline: expected several ranks; start it with mpiexec -n 2 hpcdecode bench pipeline")
    from hpcdecode.planning.steady import Steady

    team = assemble(args.comm)
    team.pin()
    torch.set_num_threads(team.me.threads)
    model = None
    if team.lead:
        args.work.mkdir(parents=True, exist_ok=True)
        model = load_split(checkpoint(args.work, args.model), dtype="bfloat16")
    shapes = team.broadcast(list(model.attends) if model else None, list[LayerShape | RecurrentShape])
    steady = Steady(team, shapes, model)
    most = max(args.lanes)
    context = args.context or _balanced(steady, SteadyLoad(args.batch, most, _TRIAL, args.steps))
    loads = [
        SteadyLoad(args.batch, lanes, context, args.steps, pieces, args.messages)
        for lanes in args.lanes
        for pieces in args.overlap
    ]
    passes = [_pass(steady, loads) for _ in range(args.passes + 1)][1:]
    if not team.lead:
        return None
    layers = len(shapes)
    return {"bench": "pipeline", "machine": machine(), "cases": _cases(loads, passes, layers)}


def _balanced(steady: Steady, trial: SteadyLoad) -> int:
    """Return the context with which the R-ranks take as long as the S-rank."""
    for _ in range(_TRIALS):
        s, r = steady.at_once(trial)
        context = int(min(max(trial.context * s / r, _SHORTEST), _LONGEST))
        trial = dataclasses.replace(trial, context=steady.team.broadcast(context, int))
    return trial.context


@dataclass(frozen=True)
class Sides:
    """Seconds of a step of each side.

    Attributes:
        s: Of the S-rank while the R-ranks do nothing.
        r: Of the slowest R-rank while the S-rank does nothing.
        s_beside: Of the S-rank while the R-ranks work.
        r_beside: Of the slowest R-rank while the S-rank works.
    """

    s: float
    r: float
    s_beside: float
    r_beside: float


@dataclass(frozen=True)
class Pass:
    """One pass over all settings.

    Attributes:
        ranks: Seconds of a step by operation, of every rank, by load.
        sides: Of the sides measured apart, by number of lanes.
    """

    ranks: dict[SteadyLoad, list[OperationSeconds]]
    sides: dict[int, Sides]


def _pass(steady: Steady, loads: list[SteadyLoad]) -> Pass:
    ranks = {load: steady.run(load) for load in loads}
    by_lanes = {load.lanes: load for load in loads}
    sides = {lanes: Sides(*steady.alone(load), *steady.at_once(load)) for lanes, load in by_lanes.items()}
    return Pass(ranks, sides)


def _cases(loads: list[SteadyLoad], passes: list[Pass], layers: int) -> list[Case]:
    return [found for load in loads for found in (*_bounds(load, loads[0], passes), *_shares(load, passes, layers))]


def _bounds(load: SteadyLoad, first: SteadyLoad, passes: list[Pass]) -> Iterator[Case]:
    """Yield the step against both sides, alone and at once, and against the first setting."""
    steps = [p.ranks[load][0]["step"] for p in passes]
    sides = [p.sides[load.lanes] for p in passes]
    s, r = [each.s for each in sides], [each.r for each in sides]
    s_beside, r_beside = [each.s_beside for each in sides], [each.r_beside for each in sides]
    alone = [max(each.s, each.r) for each in sides]
    at_once = [max(each.s_beside, each.r_beside) for each in sides]
    yield _figure(load, "S alone", s, "ms a step", "the longer side", alone)
    yield _figure(load, "R alone", r, "ms a step", "the longer side", alone)
    yield _figure(load, "S beside R", s_beside, "ms a step", "S alone", s)
    yield _figure(load, "R beside S", r_beside, "ms a step", "R alone", r)
    yield _figure(load, "step", steps, "ms", "the longer side alone", alone)
    yield _figure(load, "step", steps, "ms", "the longer of both at once", at_once)
    if load is not first:
        rates, before = ([each.batch / p.ranks[each][0]["step"] for p in passes] for each in (load, first))
        yield _figure(load, "speed", rates, "tokens/s", "the first setting", before, 1.0)


def _shares(load: SteadyLoad, passes: list[Pass], layers: int) -> Iterator[Case]:
    """Yield where the time of a step goes on the S-rank and on the first R-rank."""
    steps = [p.ranks[load][0]["step"] for p in passes]
    operations: tuple[str, ...]
    for rank, what, operations in (
        (0, "S computes", ("slice", "logits", "sample")),
        (0, "S waits", ("wait",)),
        (0, "S packs and unpacks", ("post", "take")),
        (1, "R attends", ("attend",)),
        (1, "R waits", ("wait", "idle")),
    ):
        yield _figure(load, what, _spent(load, passes, rank, operations), "ms a step", "the step", steps)
    turns = layers * load.lanes
    for rank, operations in ((0, ("post", "take", "desk")), (1, ("post", "plan"))):
        spent, name = _spent(load, passes, rank, operations), f"{'SR'[rank]}'s loop and link"
        yield _figure(load, name, spent, "us a layer and lane", "the step", steps, 1e6 / turns)


def _spent(load: SteadyLoad, passes: list[Pass], rank: int, operations: Sequence[str]) -> list[float]:
    return [sum(p.ranks[load][rank].get(o, 0.0) for o in operations) for p in passes]


def _figure(
    load: SteadyLoad,
    what: str,
    values: Sequence[float],
    unit: str,
    reference: str,
    against: Sequence[float],
    scale: float = 1e3,
) -> Case:
    """Return a case with values, in seconds or so, times `scale`, and their ratios to `against`."""
    pieces = f" in {load.pieces} pieces" if load.pieces > 1 else ""
    label = f"{load.lanes} lanes{pieces}, batch {load.batch}, context {load.context}: {what}"
    ratios = [a / b for a, b in zip(values, against, strict=True)]
    return case(label, [v * scale for v in values], unit, reference, ratios)
