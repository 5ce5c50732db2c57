"""FluidInfer (Xiao): its schedule against those of vLLM, FastServe and Orca, rows arriving as a Poisson process.

python jobs/figures/fluidinfer.py [--paper] [-o fluidinfer.png], and --help for the premises that flags choose;
docs/reproductions.md says what is assumed and what comes out.
"""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any, NamedTuple

import fluidinfer_paper
import numpy as np
from figure import drawn, flags, show
from shapes import SHAPES

from hpcdecode.planning import lengths
from hpcdecode.planning.hardware import device
from hpcdecode.planning.servers import SERVING
from hpcdecode.planning.servers.base import ServerLimits
from hpcdecode.planning.serving import of_device, serve

MODELS, DEVICES = ("opt-125m", "opt-1.3b", "opt-6.7b"), ("rtx4090", "4xrtx4090", "4xa100-40g")
LIMITS = ServerLimits(256, 2048, swap_space=0.0)  # vLLM's defaults; fluid has what fits in flight
ROWS, SEED, LOAD = 1000, 0, 0.8  # LOAD: rate of arrivals over that at which vLLM completes rows


class Found(NamedTuple):
    """What was found, by schedule.

    Attributes:
        speed: Tokens per second with all rows there at the start.
        latency: Mean seconds a token, from arrival to end, with rows arriving at 0.8 of vLLM's rate.
        bound: Mean of the rows' largest gaps between two tokens, of the same arrivals.
    """

    speed: dict[str, float]
    latency: dict[str, float]
    bound: dict[str, float]


def compare(model: str, name: str, rows: int = ROWS) -> Found:
    """Return speed and latency of every schedule for a model on a device."""
    server = of_device(SHAPES[model], device(name))
    work = fluidinfer_paper.workload(rows)
    full = {schedule: serve(server, schedule, LIMITS, work) for schedule in SERVING}
    rate = LOAD * full["vllm"].rows / full["vllm"].seconds
    coming = lengths.poisson(work, rate, SEED)
    served = {schedule: serve(server, schedule, LIMITS, coming) for schedule in SERVING}
    return Found(
        {schedule: outcome.tokens_per_second for schedule, outcome in full.items()},
        {schedule: fluidinfer_paper.normalised(outcome, work) for schedule, outcome in served.items()},
        {schedule: outcome.latency_bound for schedule, outcome in served.items()},
    )


def draw(pyplot: ModuleType, found: dict[tuple[str, str], Found]) -> Any:
    """Return a figure of speeds and latency bounds over those of vLLM."""
    figure, (speed, bound) = pyplot.subplots(2, 1, figsize=(11, 7), layout="constrained")
    places, width = np.arange(len(found)), 0.8 / len(SERVING)
    for i, schedule in enumerate(SERVING):
        at = places + (i - (len(SERVING) - 1) / 2) * width
        speed.bar(at, [f.speed[schedule] / f.speed["vllm"] for f in found.values()], width, label=schedule)
        bound.bar(at, [f.bound[schedule] / f.bound["vllm"] for f in found.values()], width, label=schedule)
    speed.axhspan(*fluidinfer_paper.SPEED, color="grey", alpha=0.2, label="published, fluid")
    bound.axhline(1 / fluidinfer_paper.BOUND, color="grey", linestyle=":", label="published, fluid")
    bound.set_yscale("log")
    for axis, what in ((speed, "tokens/s"), (bound, "latency bound")):
        axis.set_xticks(places, [f"{model}\n{name}" for model, name in found])
        axis.set_ylabel(f"{what}, over vLLM's")
        axis.legend(ncols=3)
    return figure


def _paper(options: argparse.Namespace) -> None:
    """Print the tables of the paper's premises, or one row of a premise that flags describe."""
    paper, premises = fluidinfer_paper, fluidinfer_paper.PREMISES
    asked = options.kv_factor, options.kv_share, options.swap_free, options.max_num_seqs
    if any(asked):
        kv_factor, kv_share, swap_free, sequences = asked
        space = float("inf") if swap_free else 0.0
        own = paper.EnginePremise(
            "by flags", sequences or paper.SEQUENCES, kv_factor or 1.0, kv_share, swap_free, space
        )
        premises = (own,)
    found = paper.compare(premises, options.model, options.device, options.rows)
    drawn(options.output, lambda pyplot: paper.draw(pyplot, found))
    paper.report(found, options.model, options.device)
    if not any(asked):
        paper.report_loads()
        paper.report_models()


def _options() -> argparse.Namespace:
    parser, paper = flags("fluidinfer.png"), fluidinfer_paper
    add = parser.add_argument
    add("--paper", action="store_true", help="by the paper's premises; the flags below choose one premise")
    add("--kv-factor", type=float, metavar="X", help="room of a cached token over its true one (the paper's: 7.45)")
    add("--kv-share", type=float, metavar="X", help="share of the memory that is KV cache (the paper's: 0.3)")
    add("--swap-free", action="store_true", help="groups beyond the memory are in flight, and moving them is free")
    add("--max-num-seqs", type=int, metavar="N", help=f"sequences of the other engines ({paper.SEQUENCES})")
    add("--model", default=paper.MODEL, choices=paper.MODELS, help="(%(default)s)")
    add("--device", default=paper.DEVICE, help="(%(default)s)")
    add("--rows", type=int, default=paper.ROWS, metavar="N", help="of the premises (%(default)s)")
    options = parser.parse_args()
    if not options.paper and any((options.kv_factor, options.kv_share, options.swap_free, options.max_num_seqs)):
        parser.error("--kv-factor, --kv-share, --swap-free and --max-num-seqs: expected --paper beside them")
    for name in ("kv_factor", "kv_share", "max_num_seqs", "rows"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')}: expected a number above 0, got {value}")
    return options


def main() -> None:
    """Save the picture and print the tables."""
    options = _options()
    if options.paper:
        _paper(options)
        return
    found = {(model, name): compare(model, name) for model in MODELS for name in DEVICES}
    drawn(options.output, lambda pyplot: draw(pyplot, found))
    others = [schedule for schedule in SERVING if schedule != "vllm"]
    for what in Found._fields:
        show(
            (what, "device", "vllm", *(f"{s} over it" for s in others)),
            [
                (model, name, f"{of['vllm']:.4g}", *(of[s] / of["vllm"] for s in others))
                for (model, name), of in ((key, getattr(f, what)) for key, f in found.items())
            ],
        )


if __name__ == "__main__":
    main()
