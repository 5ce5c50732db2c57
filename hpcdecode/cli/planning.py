"""`hpcdecode calibrate`, `simulate` and `plan`: measure a model's costs, and predict jobs from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from hpcdecode.attention.recurrent_shapes import STATE_DTYPES
from hpcdecode.cli.arguments import add_verbosity
from hpcdecode.cli.planning_flags import add_machine, add_rows, add_schedule, check, read_rows
from hpcdecode.cli.planning_machine import asked_shape, cluster_of, shapes_of
from hpcdecode.cli.planning_tiers import memory_of, require_layout, require_use, schedule_text
from hpcdecode.config import ADMISSIONS, DTYPES, KV_DTYPES
from hpcdecode.errors import UserError
from hpcdecode.planning.servers import SERVING
from hpcdecode.ranks import launch
from hpcdecode.ranks.wishes import POOLS
from hpcdecode.schedule.limits import prefill_limit
from hpcdecode.system.model_path import find_model

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.cli.arguments import Subcommands
    from hpcdecode.planning.cluster import Cluster
    from hpcdecode.planning.job_simulator import JobGroup
    from hpcdecode.planning.layouts import PossibleLayout
    from hpcdecode.planning.lengths import Lengths
    from hpcdecode.planning.model_size import ModelSize
    from hpcdecode.planning.outcome import SimulationOutcome
    from hpcdecode.planning.planner import MeanRows

    Runner = Callable[[Lengths], SimulationOutcome]

# Relative, the larger one of SmolLM2-135M and Gemma 3 270M: hpcdecode bench accuracy.
_PERPLEXITY = {"bfloat16": 1.0, "int8": 1.001, "k8v4": 1.008, "int4": 1.02}


def _add_simulate(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict a job on other machines, with the schedules that jobs run",
        description="Predict how long rows take on S-ranks and R-ranks, or on --shards of such worlds, from data "
        "sheets. Schedule, placement and capacity are those of hpcdecode generate; see docs/planning.md. "
        f"The schedules {', '.join(SERVING)} simulate servers on the S device alone, with the KV cache in its memory; "
        "fluid with --kv-swap is the schedule of jobs.",
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
        "process or, under mpiexec or srun, on the ranks of a job: on one S-rank and its R-ranks, and on replicas.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help="as --model of generate")
    add("-o", "--output", required=True, metavar="FILE.json", help="file for the profile")
    add("--dtype", choices=DTYPES, help="data type of weights and activations (default: as generate chooses)")
    add("--kv-dtype", choices=KV_DTYPES, help="data type of the KV cache (default: --dtype)")
    help = "data type of recurrent states (%(default)s)"
    add("--mamba-ssm-cache-dtype", choices=STATE_DTYPES, default="float32", help=help)
    add("--passes", type=int, default=5, metavar="N", help="measurements of every point (%(default)s)")
    add_verbosity(parser)
    parser.set_defaults(run=_calibrate, connect=launch.world)


def _calibrate(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    from hpcdecode.planning.calibrate import calibrate

    if options.passes < 1:
        raise UserError(f"--passes: expected an integer >= 1, got {options.passes}", everywhere=True)
    model = launch.lead_first(comm, lambda: find_model(options.model, {}))
    kinds = options.dtype, options.kv_dtype
    profile = calibrate(comm, model, *kinds, options.passes, options.mamba_ssm_cache_dtype)
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
    require_use(options)
    served = options.schedule in SERVING and not (options.schedule == "fluid" and options.kv_swap)
    run = _server(options) if served else _lanes(options, rows)
    outcome = sharded(run, rows, options.shards)
    if pyplot:
        draw(outcome, pyplot, options.output)
    print(json.dumps(figures(outcome)) if options.json else text(outcome))
    return 0


def _server(options: argparse.Namespace) -> Runner:
    """Return a function that simulates a server on the S device alone."""
    from hpcdecode.planning.hardware import device
    from hpcdecode.planning.servers.base import ServerLimits
    from hpcdecode.planning.serving import of_device, serve

    for name in ("profile", "period", "load_limit", "prefill_ranks"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')}: expected none with --schedule {options.schedule}")
    if options.admission != "reserve":
        raise UserError(f"--admission {options.admission}: expected none with --schedule {options.schedule}")
    size = _size_of(options)
    server = of_device(size, device(options.s_device), options.kv_dtype)
    chunk = options.prefill_tokens or prefill_limit(True)
    return partial(serve, server, options.schedule, ServerLimits(options.batch, chunk))


def _size_of(options: argparse.Namespace) -> ModelSize:
    """Return the size of the model that the flags name, with weights and states as they say."""
    from hpcdecode.planning.model_size import ModelSize
    from hpcdecode.planning.weight_bits import weight_bits

    model = find_model(options.model, {}, weights=False)
    size = ModelSize.from_directory(model).with_states_as(_state_dtype(options))
    return replace(size, bits=weight_bits(model, options.weights))


def _state_dtype(options: argparse.Namespace) -> str:
    """Return the data type of recurrent states: of the flag, or that a profile was measured with.

    Raises:
        UserError: If the two differ.
    """
    from hpcdecode.planning.profile import read

    asked: str | None = options.mamba_ssm_cache_dtype
    if options.profile is None:
        return asked or "float32"
    measured = read(options.profile).state_dtype
    if asked not in (None, measured):
        raise UserError(
            f"--mamba-ssm-cache-dtype {asked}: expected {measured}, as {options.profile} was measured with; calibrate "
            "with this flag, or leave it out"
        )
    return measured


def _lanes(options: argparse.Namespace, rows: Lengths) -> Runner:
    """Return a function that simulates the groups of one layout."""
    from hpcdecode.planning.group_shape import ONE
    from hpcdecode.planning.simulator import SimulatedGroups, lane_limits, sharing, simulate
    from hpcdecode.planning.tiered import job_group
    from hpcdecode.schedule.auto import PERIODS, load_limit, usual_lanes

    size = _size_of(options)
    cluster = cluster_of(options, size, asked_shape(options) or ONE)
    name = options.layout or ("split" if cluster.split_cost else "replicas")
    layout = cluster.layout(name, options.s_ranks, options.pools or "shared")
    shape = layout.shape
    crosses = layout.parts[0].r_ranks > 0
    lanes = options.lanes or usual_lanes(shape.pp, shape.turns, crosses, shape.copies - shape.turns)
    if options.batch < lanes:
        raise UserError(f"--batch: expected at least one sequence a lane ({lanes}), got {options.batch}")
    steps = max(int(rows.most.max()) - 1, 1)
    period = min(options.period or max(steps // PERIODS, 1), steps)
    if options.kv_swap:
        require_layout(layout)
    kinds, groups = [], []
    for part in layout.parts:
        memory = memory_of(options, size, part) if options.kv_swap else None
        capacity = [memory.capacity() if memory else part.capacity] * max(part.r_ranks, 1)
        own, prompt = sum(capacity) // part.sharing, float(rows.prompt.mean())
        level = load_limit(options.batch, period, steps, prompt, own, part.unit.footprint)
        load = options.load_limit or level
        chunk = options.prefill_tokens or prefill_limit(part.r_ranks > 0)
        least = 1 if options.admission == "optimistic" and not options.period else None
        limits = lane_limits(options.batch, period, steps, lanes, load, options.schedule, chunk, least, shape.prefill)
        if rows.shared is not None and not (memory or shape.prefill):
            limits = sharing(limits, rows, capacity)
        kind = SimulatedGroups(
            part.cost, capacity, limits, part.count, part.sharing, part.unit, admission=options.admission
        )
        kinds.append(kind)
        if memory:
            group = job_group(memory, part.cost, limits, part.r_ranks, options.admission, memory.speeds())
            groups.append((group, part.count))
    return partial(_jobs, groups) if groups else partial(simulate, kinds)


def _jobs(groups: Sequence[tuple[JobGroup, int]], rows: Lengths) -> SimulationOutcome:
    """Simulate groups alike, each with an even share of the rows, layer by layer."""
    from hpcdecode.planning.job_simulator import simulate_job
    from hpcdecode.planning.simulator import sharded

    if len(groups) > 1:
        raise UserError("--kv-swap: expected groups that are alike, got several kinds; give --layout split")
    ((group, count),) = groups
    return sharded(partial(simulate_job, group), rows, count)


def _add_plan(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "plan",
        help="choose layout, B, F, lanes and the number of R-ranks, and predict the outcome",
        description="Choose the layout of a cluster, and batch, period and lanes of its groups, for rows of given "
        "lengths by the formulas of the steady state, and say what other layouts would reach; see docs/planning.md.",
    )
    add_machine(parser.add_argument_group("machine"))
    add_rows(parser.add_argument_group("rows (default: lognormal lengths as in ShareGPT)"))
    help = "what a row must have room for to enter, as --admission of generate (default: what is best, with --kv-swap)"
    parser.add_argument("--admission", choices=ADMISSIONS, help=help)
    parser.add_argument("--latency-limit", type=float, metavar="SECONDS", help="longest time in which a row may decode")
    parser.add_argument("--s-price", type=float, default=0.0, metavar="X", help="price of an hour of an S device")
    parser.add_argument("--r-price", type=float, default=0.0, metavar="X", help="price of an hour of an R device")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace, _comm: object) -> int:
    from hpcdecode.planning import layout_planner
    from hpcdecode.planning.plan_text import HourlyPrices, text
    from hpcdecode.planning.planner import MeanRows

    check(options)
    lengths, size = read_rows(options), _size_of(options)
    steps = max(float(lengths.new.mean()) - 1, 1.0)
    rows = MeanRows(float(lengths.prompt.mean()), steps, len(lengths), shared=lengths.mean_shared)
    wishes = layout_planner.GroupWishes(options.latency_limit)
    clusters = [cluster_of(options, size, shape) for shape in shapes_of(options, size)]
    possible = _possible(options, clusters)
    plans = layout_planner.choose_layout(possible, rows, wishes)
    refused = clusters[0].refused  # of ranks that are no groups, or of the shape that is asked for
    if not plans:
        raise UserError(
            f"expected a layout with room and time for {min(wishes.batches)} sequences of {rows.held:,.0f} tokens in "
            "every group, got none: raise --kv-memory, --s-ranks, --r-ranks or --latency-limit"
            + "".join(f"; {why}" for why in refused)
        )
    more = None if options.profile else layout_planner.one_more(plans[0], rows, wishes)
    print(text(plans, more, HourlyPrices(options.s_price, options.r_price)))
    shown = {plan.layout.family for plan in plans}
    full = dict.fromkeys(f"{one.family}: no room for rows" for one in possible if one.family not in shown)
    if options.kv_swap or options.admission:
        print(schedule_text(options, size, plans[0], lengths))
    if missing := [*refused, *full]:
        print("cannot be:", "; ".join(missing))
    if not options.profile:
        print("the same with the KV cache in", "; ".join(_kv_choices(options, size, plans[0].layout, rows)))
    return 0


def _possible(options: argparse.Namespace, clusters: Sequence[Cluster]) -> list[PossibleLayout]:
    """Return the layouts that the flags leave open, of a cluster with each of some shapes of groups.

    Raises:
        UserError: If there are none.
    """
    from hpcdecode.planning.cluster import impossible

    layout, pools = options.layout or "auto", (options.pools,) if options.pools else POOLS
    found = [one for cluster in clusters for one in cluster.layouts(layout, pools)]
    if not found:
        raise impossible(layout, clusters[0].refused)
    return found


def _kv_choices(options: argparse.Namespace, size: ModelSize, chosen: PossibleLayout, rows: MeanRows) -> Iterator[str]:
    """Yield, for each data type of the KV cache, the speed of a layout and the perplexity."""
    from hpcdecode.attention.base import LATENT_KV_DTYPES
    from hpcdecode.attention.shapes import attention_shapes
    from hpcdecode.planning.layout_planner import GroupWishes, planned_layout

    for name, perplexity in _PERPLEXITY.items():
        if name not in LATENT_KV_DTYPES and any(shape.latent for shape in attention_shapes(size.shapes)):
            continue  # refused, as K and V are one
        cluster = cluster_of(argparse.Namespace(**{**vars(options), "kv_dtype": name}), size, chosen.shape)
        same = next(one for one in _possible(options, [cluster]) if one.name == chosen.name)
        if plan := planned_layout(same, rows, GroupWishes(options.latency_limit)):
            yield f"{name}: {plan.tokens_per_second:,.0f} tokens/s, perplexity x {perplexity:g}"


COMMANDS = (_add_calibrate, _add_simulate, _add_plan)
