"""`hpcdecode split`, `bench` and `doctor`: a model and a machine looked at."""

from __future__ import annotations

import argparse

from hpcdecode.config import DTYPES, find_model
from hpcdecode.ranks import launch


def _add_split(commands) -> None:
    parser = commands.add_parser(
        "split",
        help="show how a model is cut into slices",
        description="Trace a model, cut it at every attention, and print the slices and what crosses the cuts.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face model directory, or demo")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the activations on the wire (the checkpoint's)"
    )
    parser.set_defaults(run=_split)


def _split(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.model import load_split, render

    model = load_split(find_model(options.model, {}), dtype=options.dtype, weights=False, announce=True)
    print(render(model.describe()))
    return 0


def _add_bench(commands) -> None:
    parser = commands.add_parser(
        "bench", help="measure against the machine's limits", description="Measure one part.", allow_abbrev=False
    )
    parser.add_argument(
        "name",
        choices=("attention", "products", "prefill", "accuracy", "exchange", "pipeline", "planner", "e2e", "gpu"),
        help="what to measure",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own flags; see hpcdecode bench NAME --help")
    parser.set_defaults(run=_bench, connect=launch.connect)


def _bench(options: argparse.Namespace, comm) -> int:
    from hpcdecode.bench.run import main as bench

    return bench(options.name, options.arguments, comm)


def _add_doctor(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="examine the machine and the launch, alone or under mpiexec or srun",
        description="Show what every rank has been given, and say what to change where something is wrong. "
        "Exit code 0: healthy, 1: problems were found.",
        allow_abbrev=False,
    )
    parser.add_argument("--s-ranks", type=int, metavar="K", help="as for generate (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_doctor, connect=launch.connect)


def _doctor(options: argparse.Namespace, comm) -> int:
    from hpcdecode.doctor import doctor

    return doctor(comm, options.s_ranks, options.json)


COMMANDS = (_add_split, _add_bench, _add_doctor)
