"""Flags of `bench gpu`, and its parts in order."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hpcdecode.attention.cuda import KV_DTYPES, state
from hpcdecode.bench.contenders import Site, launcher
from hpcdecode.bench.gpu.attention import attention, latents
from hpcdecode.bench.gpu.findings import Conditions
from hpcdecode.bench.gpu.first_day import first_day
from hpcdecode.bench.gpu.jobs import by_transformers, jobs, worlds
from hpcdecode.bench.gpu.parts import PARTS
from hpcdecode.bench.gpu.slices import slices, step_seconds
from hpcdecode.bench.gpu.states import states
from hpcdecode.bench.gpu.transfers import transfers
from hpcdecode.bench.gpu.weights import LARGE, expanding
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.workload import SHAPES, Workload, default_folder
from hpcdecode.errors import UserError
from hpcdecode.exchange.device import CudaCopies
from hpcdecode.model import load_split
from hpcdecode.report.benchmark import machine
from hpcdecode.system.bandwidth import read_rate
from hpcdecode.system.cores import nodes_of
from hpcdecode.system.sizes import parse_bytes

_KV_DTYPES = ("bfloat16", "int8", "k8v4", "int4")
_LANES = (1, 2)  # of jobs whose S-rank's idle share is told
_FIGURES = ("attention", "latents", "states", "weights", "slices", "transfers", "jobs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add("--only", nargs="+", default=list(_FIGURES), choices=_FIGURES, help="what to measure (default: all)")
    add("--model", choices=tuple(SHAPES), default="355m", help="checkpoint to make (%(default)s)")
    add("--batch", type=int, nargs="+", default=[64, 256, 1024], help="(default: 64 256 1024)")
    add("--context", type=int, nargs="+", default=[2048, 8192], help="tokens of a sequence (default: 2048 8192)")
    add("--kv-dtype", nargs="+", default=list(_KV_DTYPES), choices=KV_DTYPES, help=f"(default: {' '.join(_KV_DTYPES)})")
    add("--rows", type=int, default=512, help="of the jobs (%(default)s)")
    add("--new-tokens", type=int, default=128, help="of every row (%(default)s)")
    add("--gpu-memory", type=parse_bytes, metavar="SIZE", help="that jobs take of the GPU at most, such as 24G")
    add("--passes", type=int, default=9)
    add("--work", type=Path, default=default_folder(), metavar="DIR", help="checkpoints and reports (%(default)s)")
    add("--first-day", action="store_true", help="check a GPU that has not run hpcdecode before, part by part")
    add("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of the first day, of {', '.join(PARTS)}")
    add("--resume", action="store_true", help="leave out parts that passed before, in this work folder")
    add("--within", type=float, default=10, metavar="MINUTES", help="of the first day; later parts do not run (10)")
    add("--keep-going", action="store_true", help="go on with the first day after a failed part")
    add("--emulated", action="store_true", help="run the first day on the CPU, small, with the kernels emulated")


def run(args: argparse.Namespace) -> Report | int:
    """Measure what `--only` names, or run the first day.

    Returns:
        The figures; of a first day the exit code, 1 if a part failed.

    Raises:
        UserError: If there is no GPU.
    """
    if not torch.cuda.is_available() and not (args.first_day and args.emulated):
        found = f"found none (hpcdecode: {state()})"
        hint = "; --emulated runs the first day without one" if args.first_day else ""
        raise UserError(f"bench gpu: expected a GPU and a CUDA build of torch, {found}{hint}")
    args.work.mkdir(parents=True, exist_ok=True)
    if args.first_day:
        on = Conditions(args.work.resolve(), args.emulated)
        return first_day(on, args.parts or PARTS, 60 * args.within, resume=args.resume, keep_going=args.keep_going)
    device = torch.device("cuda", 0)
    if "jobs" in args.only:
        launcher(2)  # raises UserError if there is none, before all else
    cases = [*_of_kv(args, device), *_of_models(args, device)]
    return {"bench": "gpu", "machine": {**machine(), **_about(device)}, "cases": cases}


def _about(device: torch.device) -> dict[str, Any]:
    rate = round(read_rate(sorted(os.sched_getaffinity(0))) / 1e9, 1)
    return {"read GB/s": rate, "gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def _of_kv(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Yield the figures of KV caches, states and weights."""
    given = device, args.batch[0], args.context, args.kv_dtype, args.passes
    if "attention" in args.only:
        yield from attention(*given)
    if "latents" in args.only:
        yield from latents(*given)
    if "states" in args.only:
        yield from states(device, args.batch[0], args.passes)
    if "weights" in args.only:
        yield from expanding(device, LARGE, args.passes)


def _of_models(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Yield the figures of slices, transfers and jobs."""
    site, batch, alone = Site(args.work.resolve(), args.model), min(max(args.batch), args.rows), {}
    for inductor in (True, False) if {"slices", "transfers", "jobs"} & {*args.only} else ():
        if inductor and "slices" not in args.only:
            continue
        model = load_split(site.checkpoint, dtype="bfloat16", device=device, inductor=inductor)
        for tokens in args.batch:
            if "slices" in args.only:
                yield from slices(model, site.shape, tokens, args.passes, "compiled slices" if inductor else "slices")
            if "transfers" in args.only and not inductor:
                yield from transfers(model, CudaCopies(device), tokens, args.passes)
        if "jobs" in args.only and not inductor:
            alone = {lanes: step_seconds(model, batch // lanes, args.passes) for lanes in _LANES}
        del model  # before the next one comes
        gc.collect()
        torch.cuda.empty_cache()
    if "jobs" in args.only:
        work = Workload("gpu", args.rows, 256, 512, args.new_tokens)
        flags = ["--batch", str(batch), *(["--gpu-memory", str(args.gpu_memory)] if args.gpu_memory else [])]
        nodes = len(set(nodes_of(os.sched_getaffinity(0))))
        found = [*jobs(site, work, worlds(nodes, torch.cuda.device_count()), flags, batch, alone)]
        yield from found
        yield by_transformers(site, work, found[0])
