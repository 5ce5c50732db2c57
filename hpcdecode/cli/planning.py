"""`hpcdecode calibrate`, `simulate` and `plan`: measure a model's costs, and predict jobs from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hpcdecode.cli.arguments import add_verbosity
from hpcdecode.cli.planning_flags import WIDTHS, add_machine, add_rows, add_schedule, check, read_rows
from hpcdecode.config import DTYPES, KV_DTYPES, find_model
from hpcdecode.errors import UserError
from hpcdecode.planning.servers import SERVING
from hpcdecode.ranks import launch
from hpcdecode.schedule.limits import prefill_limit

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.cli.arguments import Subcommands
    from hpcdecode.planning.cost import Cost
    from hpcdecode.planning.lengths import Lengths
    from hpcdecode.planning.model_size import ModelSize
    from hpcdecode.planning.outcome import Outcome
    from hpcdecode.planning.planner import Candidate, MeanRows
    from hpcdecode.planning.simulator import SimulatedWorld

    Runner = Callable[[Lengths], Outcome]

_PERPLEXITY = {"bfloat16": 1.0, "int8": 0.9999, "int4": 1.011}  # relative, of the demo model: hpcdecode bench accuracy


def _add_simulate(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict a job on other machines, with the schedules that jobs run",
        description="Predict how long rows take on one S-rank and its R-ranks, or on --shards of such worlds, from "
        "data sheets. Schedule, placement and capacity are those of hpcdecode generate; see docs/planning.md. "
        f"The schedules {', '.join(SERVING)} simulate servers on the S device alone, with the KV cache in its memory.",
        allow_abbrev=False,
    )
    add_machine(parser.add_argument_group("machine"))
    add_rows(parser.add_argument_group("rows (default: lognormal lengths as in ShareGPT)"))
    add_schedule(parser.add_argument_group("schedule"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-o", "--output", metavar="FILE.png", help="plot the load and the latencies (extra plot)")
    parser.set_defaults(run=_simulate)


def _add_calibrate(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure what a model costs on this machine, for plan, simulate and generate",
        description="Measure lanes in their steady state over a range of batches, contexts and prompts, in a single "
        "process or, under mpiexec or srun, on one S-rank and its R-ranks, as a job runs on them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="directory of a Hugging Face model, or demo")
    add("-o", "--output", required=True, metavar="FILE.json", help="file for the profile")
    add("--dtype", choices=DTYPES, help="data type of weights and activations (default: as generate chooses)")
    add("--kv-dtype", choices=KV_DTYPES, help="data type of the KV cache (default: --dtype)")
    add("--passes", type=int, default=5, metavar="N", help="measurements of every point (%(default)s)")
    add_verbosity(parser)
    parser.set_defaults(run=_calibrate, connect=launch.world)


def _calibrate(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    from hpcdecode.planning.calibrate import calibrate

    if options.passes < 1:
        raise UserError(f"--passes: expected an integer >= 1, got {options.passes}", everywhere=True)
    profile = calibrate(comm, find_model(options.model, {}), options.dtype, options.kv_dtype, options.passes)
    if profile is None:
        return 0
    try:
        Path(options.output).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))
    except OSError as error:
        raise UserError(f"-o {options.output}: expected a file that can be written: {error}") from None
    return 0


def _simulate(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.planning.outcome import draw, figures, text
    from hpcdecode.planning.simulator import sharded
    from hpcdecode.report.plot import canvas

    check(options)
    pyplot = canvas() if options.output else None
    rows = read_rows(options)
    run = _server(options) if options.schedule in SERVING else _lanes(options, rows)
    outcome = sharded(run, rows, options.shards)
    if pyplot:
        draw(outcome, pyplot, options.output)
    print(json.dumps(figures(outcome)) if options.json else text(outcome))
    return 0


def _server(options: argparse.Namespace) -> Runner:
    """Return a function that simulates a server on the S device alone."""
    from hpcdecode.planning.hardware import device
    from hpcdecode.planning.model_size import ModelSize
    from hpcdecode.planning.servers.base import ServerLimits
    from hpcdecode.planning.serving import of_device, serve

    for name in ("profile", "period", "load_limit"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')}: expected none with --schedule {options.schedule}")
    size, width = ModelSize.from_directory(find_model(options.model, {})), WIDTHS[options.kv_dtype]
    server = of_device(size, device(options.s_device), width)
    chunk = options.prefill_tokens or prefill_limit(True)
    return partial(serve, server, options.schedule, ServerLimits(options.batch, chunk))


def _lanes(options: argparse.Namespace, rows: Lengths) -> Runner:
    """Return a function that simulates an S-rank and its R-ranks."""
    from hpcdecode.planning.simulator import simulate

    return partial(simulate, _world(options, rows))


class Machine(NamedTuple):
    """A model on an S-rank and its R-ranks.

    Attributes:
        size: Size of the model.
        cost: Its costs on this machine.
        r_ranks: Number of R-ranks; 0 for a single process.
        measured: Whether the costs were measured with as many R-ranks.
        capacity: KV tokens of an R-rank.
    """

    size: ModelSize
    cost: Cost
    r_ranks: int
    measured: bool
    capacity: int


def _machine(options: argparse.Namespace, size: ModelSize | None = None) -> Machine:
    from hpcdecode.planning.cost import of_devices
    from hpcdecode.planning.hardware import device
    from hpcdecode.planning.model_size import ModelSize
    from hpcdecode.planning.profile import read

    size, width = size or ModelSize.from_directory(find_model(options.model, {})), WIDTHS[options.kv_dtype]
    link, latency = options.link * 1e9 / 8, options.latency * 1e-6
    if options.profile is None:
        ranks = 4 if options.r_ranks is None else options.r_ranks
        if ranks < 1:
            raise UserError(f"--r-ranks: expected a number >= 1, or 0 with --profile (one process), got {ranks}")
        cost = of_devices(size, device(options.s_device), device(options.r_device), link, latency, width)
        return Machine(size, cost, ranks, False, int(options.kv_memory / size.kv_bytes_per_token(width)))
    profile = read(options.profile)
    capacity = int(options.kv_memory / size.kv_bytes_per_token(WIDTHS[profile.kv_dtype]))
    measured = profile.ranks - 1
    if options.r_ranks in (None, measured):
        return Machine(size, profile.cost, measured, True, capacity)
    if measured or options.r_ranks < 0:
        raise UserError(f"--r-ranks: expected {measured}, as {options.profile} was measured on, got {options.r_ranks}")
    cost = msgspec.structs.replace(
        profile.cost,
        wire_seconds_per_token=size.wire_bytes_per_token / link,
        message_latency_seconds=latency,
        shared_core_fraction=0.0,
    )
    return Machine(size, cost, options.r_ranks, False, capacity)


def _world(options: argparse.Namespace, rows: Lengths) -> SimulatedWorld:
    from hpcdecode.planning.simulator import SimulatedWorld, lane_limits
    from hpcdecode.schedule.auto import PERIODS, load_limit

    machine = _machine(options)
    lanes = options.lanes or (2 if machine.r_ranks else 1)
    if options.batch < lanes:
        raise UserError(f"--batch: expected at least one sequence a lane ({lanes}), got {options.batch}")
    steps = max(int(rows.most.max()) - 1, 1)
    period = min(options.period or max(steps // PERIODS, 1), steps)
    capacity = [machine.capacity] * max(machine.r_ranks, 1)
    load = options.load_limit or load_limit(options.batch, period, steps, float(rows.prompt.mean()), sum(capacity))
    chunk = options.prefill_tokens or prefill_limit(machine.r_ranks > 0)
    limits = lane_limits(options.batch, period, steps, lanes, load, options.schedule, chunk)
    return SimulatedWorld(machine.cost, capacity, limits)


def _add_plan(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "plan",
        help="choose B, F, lanes and the number of R-ranks, and predict the outcome",
        description="Choose batch, period, lanes and the number of R-ranks for rows of given lengths, by the formulas "
        "of the steady state, and compare with the S device alone; see docs/planning.md.",
        allow_abbrev=False,
    )
    add_machine(parser.add_argument_group("machine (--r-ranks: the most to choose)"))
    add_rows(parser.add_argument_group("rows (default: lognormal lengths as in ShareGPT)"))
    parser.add_argument("--latency-limit", type=float, metavar="SECONDS", help="longest time in which a row may decode")
    parser.add_argument("--s-price", type=float, default=0.0, metavar="X", help="price of an hour of the S-rank")
    parser.add_argument("--r-price", type=float, default=0.0, metavar="X", help="price of an hour of an R-rank")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.planning import planner
    from hpcdecode.planning.plan_text import HourlyPrices, text

    check(options)
    lengths, machine = read_rows(options), _machine(options)
    rows = planner.MeanRows(float(lengths.prompt.mean()), max(float(lengths.new.mean()) - 1, 1.0), len(lengths))
    capacity = machine.capacity
    choice = planner.choice(capacity, machine.r_ranks, machine.measured, options.latency_limit)
    plan = planner.choose(machine.cost, rows, choice)
    more = None if machine.measured else planner.one_more(machine.cost, plan, choice)
    single = None if options.profile else _alone(options, machine, rows)
    prices = HourlyPrices(options.s_price, options.r_price)
    print(text(plan, more, single, capacity, machine.size, prices, bool(options.profile)))
    if not options.profile:
        print("KV cache in", "; ".join(_kv_choices(options, machine.size, rows)))
    return 0


def _alone(options: argparse.Namespace, machine: Machine, rows: MeanRows) -> Candidate | None:
    """Return the best setting of the S device alone, with the KV cache in its memory, or None if nothing fits."""
    from hpcdecode.planning import planner
    from hpcdecode.planning.hardware import BANDWIDTH_EFFICIENCY, device

    s, token_bytes = device(options.s_device), machine.size.kv_bytes_per_token(WIDTHS[options.kv_dtype])
    capacity = int(max((s.memory_bytes or 0) - machine.size.weight_bytes, 0) / token_bytes)
    return planner.alone(machine.cost, token_bytes / (s.bytes_per_second * BANDWIDTH_EFFICIENCY), rows, capacity)


def _kv_choices(options: argparse.Namespace, size: ModelSize, rows: MeanRows) -> Iterator[str]:
    """Yield, for each data type of the KV cache, the speed of the planner's choice and the perplexity."""
    from hpcdecode.planning import planner

    for name, perplexity in _PERPLEXITY.items():
        machine = _machine(argparse.Namespace(**{**vars(options), "kv_dtype": name}), size)
        choice = planner.choice(machine.capacity, machine.r_ranks, False, options.latency_limit)
        speed = planner.choose(machine.cost, rows, choice).tokens_per_second
        yield f"{name}: {speed:,.0f} tokens/s, perplexity x {perplexity:g}"


COMMANDS = (_add_calibrate, _add_simulate, _add_plan)
