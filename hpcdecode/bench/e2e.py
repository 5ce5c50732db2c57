"""`hpcdecode bench e2e`: whole jobs against what the machine allows, and against other engines.

A random checkpoint (bfloat16; a Llama of 355M parameters, or another --model, hybrids and latent attention among them)
and prompts are made once and kept in the work folder; `--model` also takes a checkpoint of yours. Each round measures
the limits, then runs every contender, greedy, in a fresh process. Loading and compiling are off the clock. Ratios are
medians over the rounds. The ideal is every GEMM at the rate of the fastest plain GEMM, in bfloat16 or on CPUs without
its arithmetic in float32, plus the bytes of the KV cache, and those of recurrent states read and written, at the read
bandwidth. Both are measured in the same round (`bench/limits.py` has the formula). Of a checkpoint of yours that is no
Llama, the ideal of the weights is the longer of their FLOP at the rate of a large GEMM and of reading those that tokens
touch, in the bits that they have in memory. It reads K and V of all tokens, windows or not.

The peer LLM is hpcdecode's own library, warmed up as peers are; its command line begins with a cold process.

Workloads: w1, w64, w128 and w256 are that many prompts of 64 to 128 tokens, l32 is 32 prompts of 1,024. Every row gets
128 new tokens. s32, for slow peers, is 32 prompts of 64 to 128 tokens with 32 new ones. e1, e4, e16 and e64 ask for
functions of Python's standard library with type hints, el16 for 20 functions in each of 16 rows; they need a trained
model. "whole job", "decode" and "prefill" are fractions of the ideal. "peak memory" is against weights, KV cache and
300 MiB. "start-up" is from the start of the process to the first decode step, against importing torch and transformers.
It is cold (no trace kept, the checkpoint out of the page cache) or warm. Lower is better for these two.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hpcdecode.bench.contenders import LIBRARY, PEERS, Hpcdecode, MeasuredRun, Peer, Site
from hpcdecode.bench.edits import EDITS
from hpcdecode.bench.limits import PREFILL_TOKENS, Ideal, ideal
from hpcdecode.bench.mixed_configs import MIXED
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.own_models import shape_of
from hpcdecode.bench.workload import SHAPES, WORKLOADS, Workload, default_folder
from hpcdecode.errors import UserError
from hpcdecode.report.benchmark import case, machine

_PARTS = {
    "whole job": "seconds",
    "decode": "decode_seconds",
    "prefill": "prefill_seconds",
}  # attributes of a run
_AGREEMENT = {None: 0.5, "int8": 0.5, "int4": 0.1}  # of first tokens: near-ties cost a few, roundings to int4 many
_MEMORY_BASE = 300 << 20
_WORKLOADS = {**WORKLOADS, **EDITS}
_STARTUP = Workload("startup", 1, 64, 64, new=2)
_IMPORTS = "import torch, transformers; from hpcdecode.report.stages import process_seconds; print(process_seconds())"


@dataclass(frozen=True)
class Round:
    """The limits and one run of every contender, close in time.

    Attributes:
        gflops: GFLOP/s of the layers' GEMMs at a chunk of PREFILL_TOKENS.
        read: Read bandwidth in GB/s.
        ideal: Least seconds of the workload.
        runs: Of the contenders, in their order.
    """

    gflops: float
    read: float
    ideal: Ideal
    runs: list[MeasuredRun]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add("--workload", nargs="+", default=["w64"], choices=tuple(_WORKLOADS), help="(default: w64)")
    add("--runs", type=int, default=3, metavar="N", help="rounds (%(default)s)")
    add("--ranks", type=int, nargs="+", default=[1], metavar="N", help="ranks of hpcdecode on this host (default: 1)")
    add(
        "--peer",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME[=PYTHON]",
        help=f"{', '.join(PEERS)}; PYTHON is the interpreter of the environment that it is installed in",
    )
    add(
        "--weights",
        choices=("int8", "int4"),
        help="of all contenders, llama.cpp's Q8_0 or Q4_K_M; the ideal stays that of bfloat16 (bfloat16)",
    )
    add("--activations", choices=("int8",), help="of hpcdecode; peers round activations by int4 weights in any case")
    help = "of hpcdecode and vLLM, as `generate` takes it; hpcdecode also runs without it"
    add("--speculative-config", metavar="JSON", help=help)
    add("--startup", action="store_true", help="also measure the start-up, cold and warm")
    add(
        "--model",
        default="355m",
        metavar="NAME|DIR",
        help=f"checkpoint to make, one of {', '.join((*SHAPES, *MIXED))} (tiny is to try the command), a "
        "model directory or a GGUF file (%(default)s)",
    )
    add("--work", type=Path, default=default_folder(), metavar="DIR", help="checkpoints and logs (%(default)s)")
    add(
        "--prefix", type=shlex.split, default=[], metavar="COMMAND", help="start every run with it: taskset -c 0-7, ..."
    )


def run(args: argparse.Namespace) -> Report:
    """Run all contenders on all workloads.

    Raises:
        UserError: If a contender is missing or fails.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no run outlives this process
    shape_of(args.model)  # raises UserError before anything is made
    args.work.mkdir(parents=True, exist_ok=True)
    plain = Site(args.work.resolve(), args.model, args.prefix, args.weights, args.activations)
    site = replace(plain, guesses=args.speculative_config)
    ways = (site, plain) if site.guesses else (site,)
    contenders = [Hpcdecode(way, n) for way in ways for n in args.ranks] + [Peer.parse(site, p) for p in args.peer]
    for contender in contenders:
        contender.prepare()
    cases: list[Case] = []
    every: list[Round] = []
    for name in args.workload:
        rounds = [play(site, contenders, _WORKLOADS[name], turn) for turn in range(args.runs)]
        cases += compare(site, contenders, _WORKLOADS[name], rounds)
        every += rounds
    if args.startup:
        cases += startup(site, args.ranks[0], args.runs)
    limits = {
        "GEMM GFLOP/s": round(statistics.median(r.gflops for r in every), 1),
        "read GB/s": round(statistics.median(r.read for r in every), 1),
    }
    return {"bench": "e2e", "machine": {**machine(), **limits}, "cases": cases}


def play(site: Site, contenders: list[Hpcdecode | Peer], workload: Workload, turn: int) -> Round:
    """Run one round, of which another contender is the first in every turn.

    Raises:
        UserError: If a contender does not do the same work.
    """
    limits = site.limits(workload)
    lengths = [len(ids) for ids in site.prompts(workload)]
    best = ideal(site.shape, lengths, workload.new, limits, workload.shared)
    gflops = 2 * PREFILL_TOKENS * site.shape.layer_weights / limits.body[PREFILL_TOKENS] / 1e9
    _say(f"{workload.name}: {gflops:.0f} GFLOP/s, {limits.read / 1e9:.1f} GB/s, ideal {best.seconds:.2f} s")
    found: dict[str, MeasuredRun] = {}
    first = turn % len(contenders)
    for contender in (*contenders[first:], *contenders[:first]):
        found[contender.name] = own = contender.run(workload)
        _say(
            f"{workload.name}: {contender.name} {own.seconds:.2f} s (prefill {own.prefill_seconds:.2f} s), "
            f"{best.seconds / own.seconds:.0%} of the ideal"
        )
    runs = [found[contender.name] for contender in contenders]
    for contender, own in zip(contenders, runs, strict=True):
        _require_same_work(contender.name, workload, own, runs[0], _AGREEMENT[site.weights])
    return Round(gflops, limits.read / 1e9, best, runs)


def compare(site: Site, contenders: list[Hpcdecode | Peer], workload: Workload, rounds: list[Round]) -> Iterator[Case]:
    """Yield every contender against the ideal, and the first one and the library against every other."""
    prompts = sum(map(len, site.prompts(workload)))
    made = workload.rows * workload.new
    tokens = {"seconds": made, "decode_seconds": made - workload.rows, "prefill_seconds": prompts}
    kept = (prompts + made) * site.shape.kv_bytes + workload.rows * site.shape.state_bytes
    memory = site.shape.weight_bytes + kept + _MEMORY_BASE
    for i, contender in enumerate(contenders):
        runs = [r.runs[i] for r in rounds]
        who = f"{workload.name}, {contender.name} {runs[0].version}"
        for part, field in _PARTS.items():
            took, best = ([getattr(x, field) for x in them] for them in (runs, [r.ideal for r in rounds]))
            yield case(f"{who}: {part}", _over(tokens[field], took), "tokens/s", "ideal", _quotients(best, took))
        peaks = [r.peak_bytes / memory for r in runs]
        mebibytes = [r.peak_bytes / 2**20 for r in runs]
        yield case(f"{who}: peak memory", mebibytes, "MiB", "weights + KV + 300 MiB", peaks)
    seconds = {c.name: [r.runs[i].seconds for r in rounds] for i, c in enumerate(contenders)}
    first, *others = seconds
    pairs = [(first, other) for other in others]
    pairs += [(LIBRARY, other) for other in others if LIBRARY in others and other != LIBRARY]
    for ours, theirs in pairs:
        ratios = _quotients(seconds[theirs], seconds[ours])
        yield case(f"{workload.name}, {ours}: whole job", _over(made, seconds[ours]), "tokens/s", theirs, ratios)


def startup(site: Site, ranks: int, runs: int) -> list[Case]:
    """Return the seconds to the first decode step: without trace and page cache (cold), and with both (warm)."""
    imports: list[float] = []
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(runs):
        imports.append(float(site.call("imports", [sys.executable, "-c", _IMPORTS])))
        _evict(site.checkpoint)
        with TemporaryDirectory() as cache:
            ours = Hpcdecode(replace(site, prefix=["env", f"HPCDECODE_CACHE={cache}", *site.prefix]), ranks)
            for seconds in (cold, warm):
                run = ours.run(_STARTUP)
                seconds.append(run.startup_seconds + run.prefill_seconds)
        _say(f"start-up: {cold[-1]:.2f} s cold, {warm[-1]:.2f} s warm, imports alone {imports[-1]:.2f} s")
    return [
        case(f"start-up, {name}", seconds, "s", "importing torch and transformers", _quotients(seconds, imports))
        for name, seconds in (("cold", cold), ("warm", warm))
    ]


def _require_same_work(
    name: str, workload: Workload, run: MeasuredRun, first: MeasuredRun, agreement: float = 0.5
) -> None:
    """Raise UserError if a run has other numbers of tokens than asked for, or begins unlike the first contender.

    A single row may begin otherwise, as its first token may be a near-tie.
    """
    lengths = {len(row) for row in run.tokens}
    if len(run.tokens) != workload.rows or lengths != {workload.new}:
        raise UserError(
            f"{workload.name}: {name} generated {len(run.tokens)} rows of {sorted(lengths)} tokens; expected "
            f"{workload.rows} rows of {workload.new}"
        )
    same = sum(a[0] == b[0] for a, b in zip(run.tokens, first.tokens, strict=True))
    if same < int(agreement * workload.rows):
        raise UserError(
            f"{workload.name}: {name} begins {same} of {workload.rows} rows with the first contender's token; expected "
            f"{agreement:.0%} or more: the two do not compute the same model"
        )


def _evict(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.iterdir():
        with open(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _over(amount: int, seconds: Sequence[float]) -> list[float]:
    return [amount / s for s in seconds]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
