"""Flags of `hpcdecode simulate` and `plan`: a machine, rows and a schedule."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hpcdecode.attention.recurrent_shapes import STATE_DTYPES
from hpcdecode.cli.arguments import parsed
from hpcdecode.cli.size_flags import tier
from hpcdecode.config import ADMISSIONS, KV_DTYPES, QUANTISED, SCHEDULES
from hpcdecode.errors import UserError
from hpcdecode.planning.servers import SERVING
from hpcdecode.ranks.wishes import LAYOUTS, POOLS, ROUTES
from hpcdecode.schedule.limits import prefill_limit
from hpcdecode.system.model_path import find_model
from hpcdecode.system.sizes import parse_bytes

if TYPE_CHECKING:
    from hpcdecode.cli.arguments import Group
    from hpcdecode.planning.lengths import Lengths


def add_machine(group: Group) -> None:
    """Add the flags of a machine: S devices and R devices, and the layout of their ranks."""
    add = group.add_argument
    add("--model", required=True, metavar="MODEL", help="as --model of generate; weights are not needed")
    help = "what projections are in memory, as --weights of generate (default: auto, by the checkpoint); a step "
    help += "reads so many bytes of them, and computes as fast as in bfloat16"
    add("--weights", choices=("auto", "bfloat16", *QUANTISED), help=help)
    add("--profile", metavar="FILE", help="profile of hpcdecode calibrate, instead of data sheets")
    help = "device of an S-rank, or several that act as one, such as 4xa100 (%(default)s)"
    add("--s-device", default="a10", metavar="NAME", help=help)
    add("--r-device", default="epyc-7003", metavar="NAME", help="device of an R-rank (%(default)s)")
    help = "number of S devices (%(default)s); 0 if all ranks are R devices, some of which may be S-ranks"
    add("--s-ranks", type=int, default=1, metavar="K", help=help)
    help = "number of further S devices that only prefill (%(default)s)"
    add("--prefill-ranks", type=int, default=0, metavar="N", help=help)
    help = "number of R devices (default: 4, or as in --profile; none of --layout replicas)"
    add("--r-ranks", type=int, metavar="P", help=help)
    add("--layout", choices=LAYOUTS[1:], help="layout of the ranks (default: split if there are R devices; plan: both)")
    help = "whether all R-ranks serve every S-rank, or an even share of them each (default: shared; plan: both)"
    add("--pools", choices=POOLS, help=help)
    help = "S-ranks that share the weights and attention heads of a stage (default: 1; plan: what is best)"
    add("--tp", type=int, metavar="K", help=help)
    help = "stages of a group of S-ranks, each of which has a run of layers (default: 1; plan: what is best)"
    add("--pp", type=int, metavar="S", help=help)
    help = "whether all slices of a lane run on one S-rank or on all in turn (default: fixed; plan: what is best)"
    add("--route", choices=ROUTES, help=help)
    help = "number of such worlds, each of which has its share of the rows (%(default)s)"
    add("--shards", type=int, default=1, metavar="N", help=help)
    help = "memory of the KV cache of an R device, in either role (%(default)s)"
    add("--kv-memory", type=parsed(parse_bytes), default="128G", metavar="SIZE", help=help)
    help = "memory of an R device that is a CPU node, 0.9 of it for weights and KV cache (default: --kv-memory, and "
    help += "enough for weights beside it)"
    add("--node-memory", type=parsed(parse_bytes), metavar="SIZE", help=help)
    help = "S devices of a node, which their own link connects (%(default)s)"
    add("--node-devices", type=int, default=8, metavar="N", help=help)
    help = "tier below the KV cache of an R device, as --kv-swap of generate: host:SIZE or nvme:DIRECTORY:SIZE, with "
    help += "@RATE behind it for bytes a second; without it, and with --profile, a tier is measured on this machine; "
    help += "may be given several times"
    add("--kv-swap", type=parsed(tier), action="append", default=[], metavar="TIER", help=help)
    add("--kv-dtype", choices=KV_DTYPES, default="bfloat16", help="data type of the KV cache (%(default)s)")
    help = "data type of recurrent states (default: as in --profile, else float32)"
    add("--mamba-ssm-cache-dtype", choices=STATE_DTYPES, help=help)
    help = "bandwidth of the S-rank's network link in Gbit/s (%(default)s)"
    add("--link", type=float, default=100.0, metavar="GBIT", help=help)
    add("--latency", type=float, default=20.0, metavar="US", help="latency of a message in microseconds (%(default)s)")


def add_rows(group: Group) -> None:
    """Add the flags of rows and their lengths."""
    from hpcdecode.planning.lengths import SHAREGPT

    add = group.add_argument
    help = "take the lengths of this prompt file's rows, which all generate their max_tokens, and what they share"
    add("--prompts", metavar="FILE", help=help)
    help = "give all rows these numbers of prompt and new tokens"
    add("--fixed", type=int, nargs=2, metavar=("PROMPT", "NEW"), help=help)
    help = "mean numbers of prompt and new tokens of the lognormal lengths"
    add("--mean", type=float, nargs=2, default=SHAREGPT, metavar=("PROMPT", "NEW"), help=help)
    help = "tokens that all prompts begin with, such as a system prompt, in front of these lengths"
    add("--prefix-len", type=int, default=0, metavar="TOKENS", help=help)
    help = "prefill what several prompts begin with for each of them"
    add("--no-prefix-sharing", dest="prefix_sharing", action="store_false", help=help)
    add("--rows", type=int, default=10_000, metavar="N", help="number of rows (%(default)s)")
    add("--max-tokens", type=int, default=1024, metavar="N", help="most tokens that a row generates (%(default)s)")
    help = "rows that arrive per second, at random times (default: all are there at once)"
    add("--rate", type=float, metavar="ROWS", help=help)
    add("--seed", type=int, default=0, metavar="S", help="seed of lengths and arrivals (%(default)s)")


def add_schedule(group: Group) -> None:
    """Add the flags of a schedule."""
    add = group.add_argument
    help = "policy by which rows enter (%(default)s)"
    add("--schedule", choices=tuple(dict.fromkeys((*SCHEDULES, *SERVING))), default="fixed-f", help=help)
    help = "sequences of an S-rank that decode at once (%(default)s); the schedule fluid without --kv-swap has no limit"
    add("--batch", type=int, default=512, metavar="B", help=help)
    add("--period", type=int, metavar="F", help="steps between injections of new rows (default: max_tokens / 16)")
    help = (
        "reserve: a row enters when there is room for all of its max_tokens; optimistic: for the tokens that rows are "
    )
    help += "expected to generate, by those that have ended (%(default)s)"
    add("--admission", choices=ADMISSIONS, default="reserve", help=help)
    help = "most tokens that a step attends to under load-control (default: the level load)"
    add("--load-limit", type=int, metavar="TOKENS", help=help)
    help = "lanes of an S-rank (default: 2, or 1 in a single process)"
    add("--lanes", type=int, metavar="L", help=help)
    help = f"most prompt tokens in a step of a lane ({prefill_limit(True)}, or {prefill_limit(False)} in one process)"
    add("--prefill-tokens", type=int, metavar="N", help=help)


def check(options: argparse.Namespace) -> None:
    """Raise UserError if a number is out of range."""
    names = ("shards", "kv_memory", "rows", "max_tokens", "batch", "period", "load_limit", "lanes", "latency_limit")
    groups = ("tp", "pp", "node_memory", "node_devices")
    for name in (*names, *groups, "prefill_tokens", "link", "latency", "rate"):
        value = getattr(options, name, None)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')}: expected a number > 0, got {value}")
    for name in ("prefill_ranks", "prefix_len"):
        if getattr(options, name) < 0:
            raise UserError(f"--{name.replace('_', '-')}: expected a number >= 0, got {getattr(options, name)}")
    for name in ("fixed", "mean"):
        value = getattr(options, name)
        if value is not None and not min(value) >= 1:
            raise UserError(f"--{name}: expected two lengths >= 1, got {value[0]} {value[1]}")


def require_ranks(s_ranks: int, r_ranks: int) -> None:
    """Raise UserError if there are no such numbers of devices."""
    if min(s_ranks, r_ranks) < 0 or s_ranks + r_ranks < 1:
        raise UserError(
            f"--s-ranks, --r-ranks: expected numbers of devices, one or more together, got {s_ranks} and {r_ranks}"
        )


def read_rows(options: argparse.Namespace) -> Lengths:
    """Return the rows that the flags describe."""
    from hpcdecode.planning import lengths

    if options.prompts:
        model = find_model(options.model, {}, weights=False)
        rows = lengths.of_file(options.prompts, model, options.max_tokens, options.prefix_sharing)
    elif options.fixed:
        rows = lengths.fixed(options.rows, *options.fixed)
    else:
        prompt, new = options.mean
        rows = lengths.lognormal(options.rows, prompt, new, options.max_tokens, options.seed)
    if options.prefix_len:
        rows = lengths.behind(options.prefix_len, rows, options.prefix_sharing)
    return lengths.poisson(rows, options.rate, options.seed) if options.rate else rows
