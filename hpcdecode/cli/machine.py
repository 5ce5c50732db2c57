"""`hpcdecode split`, `bench` and `doctor`: examine a model and a machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hpcdecode.cli.arguments import add_verbosity
from hpcdecode.cli.parser import Parser
from hpcdecode.config import DTYPES
from hpcdecode.ranks import launch
from hpcdecode.ranks.wishes import LAYOUTS, Wishes
from hpcdecode.system.model_path import find_model

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.cli.arguments import Subcommands


def _add_split(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "split",
        help="show how a model is cut into slices",
        description="Trace a model, cut it at every attention, and print the slices and the tensors between them.",
    )
    parser.add_argument("model", metavar="MODEL", help="as --model of generate; weights are not needed")
    help = "data type of the activations between slices (default: that of the checkpoint)"
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=help)
    add_verbosity(parser)
    parser.set_defaults(run=_split)


def _split(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.model import load_split, render

    model = load_split(find_model(options.model, {}, weights=False), dtype=options.dtype, weights=False, announce=True)
    print(render(model.describe()))
    return 0


def _add_bench(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure parts of a job against the machine's limits",
        description="Measure one part of a job, or whole jobs, against a reference in the same run.",
    )
    add_verbosity(parser)
    parser.add_argument(
        "name",
        choices=(
            "attention",
            "products",
            "prefill",
            "recurrent",
            "steps",
            "accuracy",
            "exchange",
            "pipeline",
            "routes",
            "planner",
            "swap",
            "guesses",
            "rotation",
            "e2e",
            "gpu",
        ),
        help="the benchmark",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="flags of the benchmark; see hpcdecode bench NAME --help"
    )
    parser.set_defaults(run=_bench, connect=launch.connect)


def _bench(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    from hpcdecode.bench.run import main as bench

    return bench(options.name, options.arguments, comm, Parser)


def _add_doctor(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="examine the machine and the launch, alone or under mpiexec or srun",
        description="Show the resources of every rank, and say what to change if something is wrong. Exit codes: 0 if "
        "all is well, 1 if there are problems.",
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="auto", help="as for generate")
    parser.add_argument("--s-ranks", type=int, metavar="K", help="as for generate")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_doctor, connect=launch.connect)


def _doctor(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    from hpcdecode.doctor import doctor

    return doctor(comm, Wishes(layout=options.layout, s_ranks=options.s_ranks), options.json)


COMMANDS = (_add_split, _add_bench, _add_doctor)
