"""`hpcdecode calibrate`, `simulate` and `plan`: a machine's costs, and jobs before they are run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hpcdecode.config import DTYPES, KV_DTYPES, SCHEDULES, find_model, parse_bytes
from hpcdecode.errors import UserError
from hpcdecode.planning.servers import SERVING
from hpcdecode.ranks import launch
from hpcdecode.schedule.limits import prefill_limit

if TYPE_CHECKING:
    from hpcdecode.planning.cost import Cost, ModelSize

_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int4": 0.5}  # bytes, without scales
_PERPLEXITY = {"bfloat16": 1.0, "int8": 0.9999, "int4": 1.011}  # of the demo model: bench accuracy


def _add_simulate(commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="a job on machines that are not there, by the schedules that jobs run",
        description="Predict how long rows take on one S-rank and its R-ranks (or on --shards of them), from data "
        "sheets. The schedule, placement and capacity are those of hpcdecode generate; see docs/planning.md. "
        f"{', '.join(SERVING)} are schedules of the S device alone, its KV cache in its own memory.",
        allow_abbrev=False,
    )
    _add_machine(parser.add_argument_group("machine"))
    _add_rows(parser.add_argument_group("rows (ShareGPT-like lognormal lengths if not given)"))
    _add_schedule(parser.add_argument_group("schedule"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-o", "--output", metavar="FILE.png", help="draw the load and the latencies (extra plot)")
    parser.set_defaults(run=_simulate)


def _add_machine(group) -> None:
    add = group.add_argument
    add("--model", required=True, metavar="DIR", help="its config.json is enough")
    add("--profile", metavar="FILE", help="of hpcdecode calibrate, in place of data sheets")
    add("--s-device", default="a10", metavar="NAME", help="of the S-rank (%(default)s); 4xa100: four as one")
    add("--r-device", default="epyc-7003", metavar="NAME", help="of an R-rank (%(default)s)")
    add("--r-ranks", type=int, metavar="P", help="of an S-rank (4; with --profile as measured); 0: one process is both")
    add("--shards", type=int, default=1, metavar="N", help="such worlds, each with its share of the rows (1)")
    add("--kv-memory", type=parse_bytes, default="128G", metavar="SIZE", help="of an R-rank (%(default)s)")
    add("--kv-dtype", choices=_WIDTHS, default="bfloat16", help="(%(default)s)")
    add("--link", type=float, default=100.0, metavar="GBIT", help="of the S-rank, Gbit/s (%(default)s)")
    add("--latency", type=float, default=20.0, metavar="US", help="of a message, microseconds (%(default)s)")


def _add_rows(group) -> None:
    from hpcdecode.planning.lengths import SHAREGPT

    add = group.add_argument
    add("--prompts", metavar="FILE", help="rows of a prompt file, which all generate their max_tokens")
    add("--fixed", type=int, nargs=2, metavar=("PROMPT", "NEW"), help="rows of one length")
    add("--mean", type=float, nargs=2, default=SHAREGPT, metavar=("PROMPT", "NEW"), help="lognormal lengths")
    add("--rows", type=int, default=10_000, metavar="N", help="(%(default)s)")
    add("--max-tokens", type=int, default=1024, metavar="N", help="of a row (%(default)s)")
    add("--rate", type=float, metavar="ROWS", help="that come a second, at random; all are there at once if not given")
    add("--seed", type=int, default=0)


def _add_schedule(group) -> None:
    add = group.add_argument
    add("--schedule", choices=(*SCHEDULES, *SERVING), default="fixed-f", help="(%(default)s)")
    add("--batch", type=int, default=512, metavar="B", help="sequences at once (%(default)s); fluid has no limit")
    add("--period", type=int, metavar="F", help="steps between injections (max_tokens / 16)")
    add(
        "--load-limit", type=int, metavar="TOKENS", help="that a step may attend to under load-control (the level load)"
    )
    add("--lanes", type=int, metavar="L", help="(2, or 1 in one process)")
    help = f"most prompt tokens a step of a lane ({prefill_limit(True)}, or {prefill_limit(False)} in one process)"
    add("--prefill-tokens", type=int, metavar="N", help=help)


def _add_calibrate(commands) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure what a model costs on this machine, for plan, simulate and generate",
        description="Measure lanes in their steady state at a range of batches, contexts and prompts, on one process "
        "or, under mpiexec or srun, on one S-rank and its R-ranks side by side as a job runs on them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face model directory, or demo")
    add("-o", "--output", required=True, metavar="FILE.json")
    add("--dtype", choices=DTYPES, help="of weights and activations (as generate chooses)")
    add("--kv-dtype", choices=KV_DTYPES, help="of the KV cache (as --dtype)")
    add("--passes", type=int, default=5, help="(%(default)s)")
    parser.set_defaults(run=_calibrate, connect=launch.world)


def _calibrate(options: argparse.Namespace, comm) -> int:
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


def _simulate(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.planning.outcome import draw, figures, text
    from hpcdecode.planning.simulator import sharded
    from hpcdecode.report.plot import canvas

    _check(options)
    pyplot = canvas() if options.output else None
    runner = _server if options.schedule in SERVING else _lanes
    rows = _rows(options)
    outcome = sharded(runner(options, rows), rows, options.shards)
    if pyplot:
        draw(outcome, pyplot, options.output)
    print(json.dumps(figures(outcome)) if options.json else text(outcome))
    return 0


def _server(options: argparse.Namespace, _rows):
    """What runs rows on the S device alone."""
    from hpcdecode.planning.cost import ModelSize
    from hpcdecode.planning.hardware import device
    from hpcdecode.planning.servers.base import ServerLimits
    from hpcdecode.planning.serving import of_device, serve

    for name in ("profile", "period", "load_limit"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')}: expected none with --schedule {options.schedule}")
    size, width = ModelSize.of(find_model(options.model, {})), _WIDTHS[options.kv_dtype]
    server = of_device(size, device(options.s_device), width)
    chunk = options.prefill_tokens or prefill_limit(True)
    return partial(serve, server, options.schedule, ServerLimits(options.batch, chunk))


def _lanes(options: argparse.Namespace, rows):
    """What runs rows on an S-rank and its R-ranks."""
    from hpcdecode.planning.simulator import simulate

    return partial(simulate, _world(options, rows))


def _check(options: argparse.Namespace) -> None:
    names = ("shards", "kv_memory", "rows", "max_tokens", "batch", "period", "load_limit", "lanes", "latency_limit")
    for name in (*names, "prefill_tokens", "link", "latency", "rate"):
        value = getattr(options, name, None)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')}: expected a number > 0, got {value}")
    for name in ("fixed", "mean"):
        value = getattr(options, name)
        if value is not None and not min(value) >= 1:
            raise UserError(f"--{name}: expected two lengths >= 1, got {value[0]} {value[1]}")


def _rows(options: argparse.Namespace):
    from hpcdecode.planning import lengths

    if options.prompts:
        rows = lengths.of_file(options.prompts, find_model(options.model, {}), options.max_tokens)
    elif options.fixed:
        rows = lengths.fixed(options.rows, *options.fixed)
    else:
        rows = lengths.lognormal(options.rows, *options.mean, options.max_tokens, options.seed)
    return lengths.poisson(rows, options.rate, options.seed) if options.rate else rows


class Machine(NamedTuple):
    """size: of the model; r_ranks: 0 for one process; capacity: KV tokens of an R-rank."""

    size: ModelSize
    cost: Cost
    r_ranks: int
    measured: bool  # with these R-ranks side by side
    capacity: int


def _machine(options: argparse.Namespace, size: ModelSize | None = None) -> Machine:
    from hpcdecode.planning.cost import ModelSize, of_devices
    from hpcdecode.planning.hardware import device
    from hpcdecode.planning.profile import read

    size, width = size or ModelSize.of(find_model(options.model, {})), _WIDTHS[options.kv_dtype]
    link, latency = options.link * 1e9 / 8, options.latency * 1e-6
    if options.profile is None:
        ranks = 4 if options.r_ranks is None else options.r_ranks
        if ranks < 1:
            raise UserError(f"--r-ranks: expected a number >= 1, or 0 with --profile (one process), got {ranks}")
        cost = of_devices(size, device(options.s_device), device(options.r_device), link, latency, width)
        return Machine(size, cost, ranks, False, int(options.kv_memory / size.kv_bytes(width)))
    profile = read(options.profile)
    capacity = int(options.kv_memory / size.kv_bytes(_WIDTHS[profile.kv_dtype]))
    measured = profile.ranks - 1
    if options.r_ranks in (None, measured):
        return Machine(size, profile.cost, measured, True, capacity)
    if measured or options.r_ranks < 0:
        raise UserError(f"--r-ranks: expected {measured}, as {options.profile} was measured on, got {options.r_ranks}")
    wire = size.wire_bytes / link
    cost = msgspec.structs.replace(profile.cost, wire=wire, latency=latency, shared=0.0)
    return Machine(size, cost, options.r_ranks, False, capacity)


def _world(options: argparse.Namespace, rows):
    from hpcdecode.planning.simulator import World, lane_limits
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
    return World(machine.cost, capacity, limits)


def _add_plan(commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="choose B, F, lanes and the number of R-ranks, and say what comes of it",
        description="Choose the batch, the period, the lanes and the number of R-ranks for rows of some lengths, by "
        "the formulas of the steady state, and compare with the S device alone; see docs/planning.md.",
        allow_abbrev=False,
    )
    _add_machine(parser.add_argument_group("machine (--r-ranks: at most so many)"))
    _add_rows(parser.add_argument_group("rows (ShareGPT-like lognormal lengths if not given)"))
    parser.add_argument("--latency-limit", type=float, metavar="SECONDS", help="in which a row decodes, at most")
    parser.add_argument("--s-price", type=float, default=0.0, metavar="X", help="of an hour of the S-rank")
    parser.add_argument("--r-price", type=float, default=0.0, metavar="X", help="of an hour of an R-rank")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace, _comm) -> int:
    from hpcdecode.planning import planner
    from hpcdecode.planning.hardware import BANDWIDTH, device

    _check(options)
    lengths, machine = _rows(options), _machine(options)
    rows = planner.MeanRows(float(lengths.prompt.mean()), max(float(lengths.new.mean()) - 1, 1.0), len(lengths))
    capacity = machine.capacity
    choice = planner.choice(capacity, machine.r_ranks, machine.measured, options.latency_limit)
    plan = planner.choose(machine.cost, rows, choice)
    more, single = None, None
    if not machine.measured:
        more = planner.one_more(machine.cost, plan, choice)
    if not options.profile:
        s, token_bytes = device(options.s_device), machine.size.kv_bytes(_WIDTHS[options.kv_dtype])
        room = int(max(s.memory - machine.size.weight_bytes, 0) / token_bytes)
        single = planner.alone(machine.cost, token_bytes / (s.bandwidth * BANDWIDTH), rows, room)
    prices = options.s_price, options.r_price
    print(planner.text(plan, more, single, capacity, machine.size, prices, bool(options.profile)))
    if not options.profile:
        print("KV cache in", "; ".join(_kv_choices(options, machine.size, rows)))
    return 0


def _kv_choices(options: argparse.Namespace, size: ModelSize, rows) -> Iterator[str]:
    """What the planner's choice would reach with each data type, and what that costs in quality."""
    from hpcdecode.planning import planner

    for name, perplexity in _PERPLEXITY.items():
        machine = _machine(argparse.Namespace(**{**vars(options), "kv_dtype": name}), size)
        choice = planner.choice(machine.capacity, machine.r_ranks, False, options.latency_limit)
        speed = planner.choose(machine.cost, rows, choice).tokens_per_second
        yield f"{name}: {speed:,.0f} tokens/s, perplexity x {perplexity:g}"


COMMANDS = (_add_calibrate, _add_simulate, _add_plan)
