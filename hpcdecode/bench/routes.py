"""`hpcdecode bench routes`: Lamina's rotation of lanes over copies of a model, against lanes that stay on one copy.

K S-ranks, each with the whole model, and one R-rank. `rotational` has lanes that go round all S-ranks, `fixed`
the same ranks as K groups with two lanes each, or one. The context is chosen so that a slice takes `--balance` times as
long as its attention. Steps are held against the formula (Lamina, section 5.3): with t_m and t_a a layer's slice and
attention, n lanes take max(n t_m / K, n t_a, the way of one lane), with home's logits in the first. t_m and t_a are
taken from the very steps, the way from steps of one lane. Where ranks are more than cores, each has a share of a core,
by a quota of a control group, which needs root.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hpcdecode.bench.contenders import Site, launcher
from hpcdecode.bench.core_shares import CoreShares, line
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.routed import RoutedRun
from hpcdecode.bench.workload import SHAPES, default_folder
from hpcdecode.errors import UserError
from hpcdecode.report.benchmark import case, machine

_OF_CORES = 0.9  # that the shares of all ranks take together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add("--copies", type=int, default=2, metavar="K", help="S-ranks (%(default)s)")
    add("--lanes", type=int, metavar="N", help="lanes of the rotation (K + 1)")
    add("--batch", type=int, default=64, metavar="B", help="sequences of a lane (%(default)s)")
    add("--balance", type=float, nargs="+", default=[1.0, 2.0], metavar="X", help="t_m / t_a (default: 1 2)")
    add("--steps", type=int, default=4, metavar="N", help="of a measurement (%(default)s)")
    add("--passes", type=int, default=3, metavar="N", help="of all measurements (%(default)s)")
    add("--model", choices=tuple(SHAPES), default="pipeline", help="checkpoint to make (%(default)s)")
    add("--work", type=Path, default=default_folder(), metavar="DIR", help="checkpoints and logs (%(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Measure both routes.

    Raises:
        UserError: If a number is too small, or the ranks cannot have their shares.
    """
    args.lanes = args.copies + 1 if args.lanes is None else args.lanes
    for name, least in (("copies", 2), ("lanes", 1), ("batch", 1), ("steps", 1), ("passes", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name}: expected {least} or more, got {getattr(args, name)}")
    if min(args.balance) <= 0:
        raise UserError(f"--balance: expected numbers above 0, got {min(args.balance):g}")
    args.work.mkdir(parents=True, exist_ok=True)
    ranks, cores = args.copies + 1, len(os.sched_getaffinity(0))
    site = Site(args.work.resolve(), args.model)
    numbers = (args.copies, args.lanes, args.batch, args.steps, args.passes, *args.balance)
    command = [sys.executable, "-m", "hpcdecode.bench.routed", str(site.checkpoint), *map(str, numbers)]
    if ranks <= cores:
        share, said = 1.0, site.call("routes", [*launcher(ranks), *command])
    else:
        share = _OF_CORES * cores / ranks
        with CoreShares(ranks, share) as shares:
            said = site.call("routes", line(launcher(ranks)[0], command, shares))
    runs = msgspec.json.decode(said, type=list[RoutedRun])
    facts = {**machine(), "share of a core": round(share, 2)}
    return {"bench": "routes", "machine": facts, "cases": list(_cases(runs, args.copies, args.batch))}


def formula(run: RoutedRun, copies: int) -> float:
    """Return the seconds of a step by the formula of the run's route."""
    lanes = run.lanes * run.groups
    s_ranks = lanes * run.slices / copies + run.lanes * run.home
    return max(s_ranks, lanes * run.attention, run.way)


def _cases(runs: Sequence[RoutedRun], copies: int, batch: int) -> Iterator[Case]:
    """Yield steps and S busy against the formula, and speed against the rotation's, by balance and route."""
    kinds = dict.fromkeys((r.balance, r.route, r.lanes) for r in runs)
    for kind in kinds:
        own = [r for r in runs if (r.balance, r.route, r.lanes) == kind]
        first = [r for r in runs if (r.balance, r.route) == (kind[0], "rotational")]
        balance, route, lanes = kind
        name = f"t_m = {balance:g} t_a: {route}, {own[0].groups} x {lanes} lanes of {batch} at {own[0].context}"
        wanted = [formula(r, copies) for r in own]
        yield case(f"{name}, step", [1e3 * r.step for r in own], "ms", "the formula", _over(own, wanted))
        predicted = [(r.lanes * r.groups * (r.slices + r.home)) / copies / s for r, s in zip(own, wanted, strict=True)]
        busy = [r.busy / p for r, p in zip(own, predicted, strict=True)]
        yield case(f"{name}, S busy", [100 * r.busy for r in own], "%", "the formula", busy)
        rates, others = ([r.lanes * r.groups * batch / r.step for r in each] for each in (own, first))
        ratios = [a / b for a, b in zip(rates, others, strict=True)]
        yield case(f"{name}, speed", rates, "tokens/s", "rotational", ratios)


def _over(runs: Sequence[RoutedRun], seconds: Sequence[float]) -> list[float]:
    return [r.step / s for r, s in zip(runs, seconds, strict=True)]
