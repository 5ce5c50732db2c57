"""`hpcdecode bench planner`: predictions against what jobs take, and the planner's choice against other settings.

A world is one process, or ranks of this host as an S-rank and R-ranks, and as replicas. It calibrates and runs its
cases in turn, so that both see the same machine. "truth": tokens/s of whole jobs; the value is measured, the ratio is
predicted over measured. "choice": the planner's layout, B, F and lanes against a grid of others for the same rows.
"schedules": rows of very different lengths by each schedule, tokens/s and peak load. "groups": as "truth", for groups
of several S-ranks (`--tp`) on 2 and 4 ranks: four configurations a model.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hpcdecode.bench.contenders import Site, launcher
from hpcdecode.bench.mixed_configs import MIXED
from hpcdecode.bench.mixed_models import mixed_checkpoint
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.predicted import Found, PredictedCase, Predictions
from hpcdecode.bench.workload import SHAPES, default_folder
from hpcdecode.report.benchmark import case, entry, machine

_SMALL = {  # by model: many short rows, and few long ones, at smaller batches on more ranks
    "50m": (PredictedCase(96, (32, 128), (48, 64), 64, 4), PredictedCase(32, (200, 400), (48, 64), 16, 8)),
    "355m": (PredictedCase(24, (32, 96), (24, 32), 16, 4), PredictedCase(10, (150, 300), (24, 32), 8, 4)),
    **dict.fromkeys(
        MIXED, (PredictedCase(96, (32, 128), (48, 64), 32, 4), PredictedCase(32, (200, 400), (48, 64), 16, 8))
    ),
}
_OTHER = {
    "50m": (PredictedCase(64, (32, 256), (32, 64), 32, 2), PredictedCase(24, (300, 500), (48, 64), 24, 4)),
    "355m": (PredictedCase(24, (32, 96), (24, 32), 24, 8), PredictedCase(12, (100, 200), (24, 32), 6, 2)),
    **dict.fromkeys(
        MIXED, (PredictedCase(64, (32, 256), (32, 64), 32, 2), PredictedCase(24, (300, 500), (48, 64), 16, 4))
    ),
}
_GRID = [PredictedCase(128, (32, 128), (33, 33), batch, period) for batch in (16, 32, 64) for period in (2, 8)]
_SCHEDULES = [
    PredictedCase(96, (32, 128), (8, 96), 32, 6, schedule) for schedule in ("fixed-f", "load-control", "static")
]
_GROUPS = {2: (("replicas", 2),), 4: (("replicas", 2), ("replicas", 4), ("split", 2))}  # layout and tp, by ranks
SETS = ("truth", "choice", "schedules", "groups")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add("--set", nargs="+", choices=SETS, default=["truth", "choice"], help="(default: truth choice)")
    add("--model", nargs="+", choices=(*SHAPES, *MIXED), default=["50m", "355m"], help="of truth (default: 50m 355m)")
    add("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N", help="of this host (default: 1 2 3 4)")
    add("--rounds", type=int, default=2, metavar="N", help="runs of every case (%(default)s)")
    add("--work", type=Path, default=default_folder(), metavar="DIR", help="checkpoints and logs (%(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Measure all worlds.

    Raises:
        UserError: If a world cannot be started or fails.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no world outlives this process
    args.work.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = []
    errors: list[float] = []
    for ranks in args.ranks:
        for model in args.model if "truth" in args.set else ():
            sets = _SMALL if ranks % 2 else _OTHER
            report = _world(args, model, ranks, _each_layout(sets.get(model, _SMALL["355m"]), ranks), False)
            cases += _truth(f"{model}, {_named(ranks)}", report)
            errors += _errors(report)
        for model in args.model if "groups" in args.set and ranks in _GROUPS else ():
            report = _world(args, model, ranks, _groups(_SMALL.get(model, _SMALL["355m"])[0], ranks), False)
            cases += _truth(f"{model}, {_named(ranks)}", report)
            errors += _errors(report)
        if "choice" in args.set:
            cases += _choice(_named(ranks), _world(args, "50m", ranks, _each_layout(_GRID, ranks), True))
        if "schedules" in args.set:
            cases += _schedules(_named(ranks), _world(args, "50m", ranks, _each_layout(_SCHEDULES, ranks), False))
    if errors:
        middle, worst = statistics.median(errors), max(errors)
        cases.append(entry("median error", 100 * middle, "%", "measured tokens/s", middle, [middle, worst]))
        cases.append(entry("worst error", 100 * worst, "%", "measured tokens/s", worst, [middle, worst]))
    return {"bench": "planner", "machine": machine(), "cases": cases}


def _world(
    args: argparse.Namespace, model: str, ranks: int, cases: Sequence[PredictedCase], choosing: bool
) -> Predictions:
    """Start `bench.predicted` on `ranks` ranks, and return what it prints."""
    site = Site(args.work.resolve(), model)
    line = [*launcher(ranks), sys.executable, "-m", "hpcdecode.bench.predicted"]
    directory = mixed_checkpoint(site.work, model) if model in MIXED else site.checkpoint
    line += [
        str(directory),
        str(site.work),
        str(args.rounds),
        msgspec.json.encode(cases).decode(),
        "choose" if choosing else "run",
    ]
    return msgspec.json.decode(site.call("planner", line), type=Predictions)


def _each_layout(cases: Sequence[PredictedCase], ranks: int) -> list[PredictedCase]:
    """Return cases by each layout of several ranks; a replica has its share of B."""
    alone = [replace(case, layout="replicas", batch=max(case.batch // ranks, 1)) for case in cases]
    return [*(cases if ranks > 1 else ()), *alone]


def _groups(rows: PredictedCase, ranks: int) -> list[PredictedCase]:
    """Return the configurations of groups of several S-ranks; a group has its share of B."""
    made = []
    for layout, tp in _GROUPS[ranks]:
        count, lanes = (ranks // tp, 1) if layout == "replicas" else (1, 2)
        made.append(replace(rows, layout=layout, batch=max(rows.batch // count, lanes), lanes=lanes, tp=tp))
    return made


def _errors(report: Predictions) -> list[float]:
    """Return by how much predictions are off, of the median measured."""
    return [abs(found.predicted / statistics.median(found.measured) - 1) for found in report.found.values()]


def _named(ranks: int) -> str:
    return "one process" if ranks == 1 else f"{ranks} ranks"


def _truth(world: str, report: Predictions) -> Iterator[Case]:
    for name, found in report.found.items():
        ratios = [found.predicted / measured for measured in found.measured]
        yield case(f"{world}: {name}", found.measured, "tokens/s", "predicted / measured", ratios)


def _choice(world: str, report: Predictions) -> Iterator[Case]:
    """Yield the planner's choice against the best of what was measured, and then every case."""
    assert report.choice is not None, "the planner was asked to choose"
    speeds = {name: statistics.median(found.measured) for name, found in report.found.items()}
    best, own = max(speeds, key=lambda name: speeds[name]), report.choice
    ratios = [a / b for a, b in zip(report.found[own].measured, report.found[best].measured, strict=True)]
    yield case(f"{world}, chosen: {own}", report.found[own].measured, "tokens/s", f"the best of all: {best}", ratios)
    for name, found in report.found.items():
        yield case(f"{world}: {name}", found.measured, "tokens/s", "the best", [speeds[name] / speeds[best]])


def _schedules(world: str, report: Predictions) -> Iterator[Case]:
    first: Found = next(iter(report.found.values()))
    for name, found in report.found.items():
        ratios = [a / b for a, b in zip(found.measured, first.measured, strict=True)]
        yield case(f"{world}: {name}", found.measured, "tokens/s", "fixed-f", ratios)
        load = found.measured_load
        yield case(f"{world}: {name}", [load], "peak load, tokens", "fixed-f", [load / first.measured_load])
