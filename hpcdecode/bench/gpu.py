"""`hpcdecode bench gpu`: what a GPU does as S-rank, as R-rank and as both, against what it allows.

A random Llama checkpoint is made once and kept in the work folder. Attention is verified against float64 first.
attention: GB/s of attn_cuda, over latents too, against copying on the device, and what torch's operations do for int8
latents and recurrent states. slices: a step's slices and logits of B sequences against their bare GEMMs, operator by
operator and by torch's compiler. transfers: the seconds that the copies of a step add to its slices, against what they
take alone. jobs: tokens/s of whole jobs by where S and R are, against one process on the GPU; and of transformers'
continuous batching. --gpu-memory bounds what a rank takes of a GPU, as a smaller card would.
The S-rank idles for what its slices, measured alone at a lane's batch, leave of the decode time.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcdecode.attention.cuda import KV_DTYPES, state
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import filled, gpu_torch
from hpcdecode.bench.contenders import Hpcdecode, Site, launcher
from hpcdecode.bench.device_clock import copy_bytes_per_second, device_seconds
from hpcdecode.bench.gpu_torch import opened
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.workload import SHAPES, Shape, Workload, default_folder
from hpcdecode.errors import UserError
from hpcdecode.exchange.staging import Copies, CudaCopies
from hpcdecode.model import SplitModel, load_split
from hpcdecode.mpi.wait import Waitable
from hpcdecode.report.benchmark import case, machine, seconds_of
from hpcdecode.system.bandwidth import read_rate
from hpcdecode.system.cores import nodes_of
from hpcdecode.system.sizes import parse_bytes

_KV_DTYPES = ("bfloat16", "int8", "k8v4", "int4")


@dataclass(frozen=True)
class Arrangement:
    """Where S and R of a job are.

    Attributes:
        name: As printed.
        ranks: Number of ranks.
        lanes: Of the S-rank; 0 if its slices are not those that are measured alone.
        flags: Of `hpcdecode generate`.
    """

    name: str
    ranks: int
    lanes: int
    flags: tuple[str, ...]


def worlds(nodes: int, gpus: int) -> list[Arrangement]:
    """Return the arrangements of a host by NUMA nodes and GPUs; the first has all of it in one process on a GPU."""
    both, s_only = ("--device", "cuda", "--r-device", "cuda"), ("--device", "cuda", "--s-ranks", "1")
    found = [
        Arrangement("S and R on one GPU", 1, 1, both),
        Arrangement("S and R on one GPU, compiled slices", 1, 0, (*both, "--compile")),
        Arrangement("S on a GPU, R on the CPUs", 1 + nodes, 2, s_only),
        Arrangement(
            f"S and R on GPUs, {'each on one' if gpus > 1 else 'which is one'}", 2, 2, (*both, "--s-ranks", "1")
        ),
    ]
    if gpus > 1:
        found.append(Arrangement("S on a GPU, R on GPUs and CPUs", 2 + nodes, 2, (*s_only, "--r-device", "auto")))
    return [*found, Arrangement("all on the CPUs", 1, 0, ("--device", "cpu"))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add("--model", choices=tuple(SHAPES), default="355m", help="checkpoint to make (%(default)s)")
    add("--batch", type=int, nargs="+", default=[64, 256, 1024], help="(default: 64 256 1024)")
    add("--context", type=int, nargs="+", default=[2048, 8192], help="tokens of a sequence (default: 2048 8192)")
    add("--kv-dtype", nargs="+", default=list(_KV_DTYPES), choices=KV_DTYPES, help=f"(default: {' '.join(_KV_DTYPES)})")
    add("--rows", type=int, default=512, help="of the jobs (%(default)s)")
    add("--new-tokens", type=int, default=128, help="of every row (%(default)s)")
    add("--gpu-memory", type=parse_bytes, metavar="SIZE", help="that jobs take of the GPU at most, such as 24G")
    add("--passes", type=int, default=9)
    add("--work", type=Path, default=default_folder(), metavar="DIR", help="checkpoints (%(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Measure attention, slices, transfers and jobs.

    Raises:
        UserError: If there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError(f"bench gpu: expected a GPU and a CUDA build of torch, found none (hpcdecode: {state()})")
    device = torch.device("cuda", 0)
    args.work.mkdir(parents=True, exist_ok=True)
    site, batch = Site(args.work.resolve(), args.model), min(max(args.batch), args.rows)
    launcher(2)  # raises UserError if there is none, before all else
    cases = [*attention(device, args.batch[0], args.context, args.kv_dtype, args.passes)]
    cases += gpu_torch.latents(device, args.batch[0], args.context, args.kv_dtype, args.passes)
    cases += gpu_torch.states(device, args.batch[0], args.passes)
    model = load_split(site.checkpoint, dtype="bfloat16", device=device, inductor=True)
    for tokens in args.batch:
        cases += slices(model, site.shape, tokens, args.passes, "compiled slices")
    del model  # before the next one comes
    model = load_split(site.checkpoint, dtype="bfloat16", device=device)
    for tokens in args.batch:
        cases += slices(model, site.shape, tokens, args.passes)
        cases += transfers(model, CudaCopies(device), tokens, args.passes)
    slice_seconds = {lanes: step_seconds(model, batch // lanes, args.passes) for lanes in (1, 2)}
    del model
    gc.collect()
    torch.cuda.empty_cache()
    work = Workload("gpu", args.rows, 256, 512, args.new_tokens)
    flags = ["--batch", str(batch), *(["--gpu-memory", str(args.gpu_memory)] if args.gpu_memory else [])]
    cpus = sorted(os.sched_getaffinity(0))
    among = worlds(len(set(nodes_of(cpus))), torch.cuda.device_count())
    cases += jobs(site, work, among, flags, batch, slice_seconds)
    return {"bench": "gpu", "machine": {**machine(), **_about(device, cpus)}, "cases": cases}


def _about(device: torch.device, cpus: list[int]) -> dict[str, Any]:
    rate = round(read_rate(cpus) / 1e9, 1)
    return {"read GB/s": rate, "gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def attention(
    device: torch.device, batch: int, contexts: list[int], kv_dtypes: list[str], passes: int
) -> Iterator[Case]:
    """Yield GB/s of one layer of a Llama-like model, for `batch` sequences of each context."""
    for group, dim in ((1, 128), (4, 128), (8, 64)):
        shape = LayerShape(8, dim, dim, 8 * group, dim**-0.5)
        for kv_dtype in kv_dtypes:
            filled.verify(opened(shape, kv_dtype, filled.LENGTHS, device), shape, kv_dtype, device)
            for context in contexts:
                yield _attention_case(shape, kv_dtype, device, batch, context, passes)


def _attention_case(
    shape: LayerShape, kv_dtype: str, device: torch.device, batch: int, context: int, passes: int
) -> Case:
    lengths = (context,) * batch
    kv_cache = opened(shape, kv_dtype, lengths, device)
    filled.fill(kv_cache, shape, lengths, device)
    slots, counts, qkv, out = filled.decode(shape, batch, device)
    half = torch.empty(kv_cache.bytes // 2, dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    rates, ratios = [], []
    for _ in range(passes + 1):
        copy_rate = copy_bytes_per_second(half, other)
        before = kv_cache.bytes_read
        seconds = device_seconds(lambda: kv_cache.attend(0, slots, counts, qkv, out), device)
        rates.append((kv_cache.bytes_read - before) / seconds)
        ratios.append(rates[-1] / copy_rate)
    name = f"attention, {kv_dtype}, GQA{shape.group} d{shape.k_dim}, {batch} sequences of {context}"
    return case(name, [r / 1e9 for r in rates[1:]], "GB/s", "copying on the device", ratios[1:])


def slices(model: SplitModel, shape: Shape, batch: int, passes: int, name: str = "slices") -> Iterator[Case]:
    """Yield the milliseconds of a step of `batch` sequences without its attention, against its bare GEMMs."""
    x = {n: torch.randn(batch, n, dtype=model.dtype, device=model.device) for n in {n for n, _ in shape.linears}}
    sizes = [*shape.linears, (shape.hidden, shape.vocabulary)]
    weights = [torch.randn(m, n, dtype=model.dtype, device=model.device) for n, m in sizes]

    def products() -> None:
        for _ in range(shape.layers):
            for weight in weights[:-1]:
                torch.nn.functional.linear(x[weight.shape[1]], weight)
        torch.nn.functional.linear(x[shape.hidden], weights[-1])

    step, times, ratios = step_of(model, batch), [], []
    with torch.inference_mode():
        step()  # compiles
        for _ in range(passes + 1):
            limit = device_seconds(products, model.device)
            times.append(device_seconds(step, model.device))
            ratios.append(limit / times[-1])
    yield case(f"{name}, {batch} sequences", [t * 1e3 for t in times[1:]], "ms a step", "bare products", ratios[1:])


def step_seconds(model: SplitModel, batch: int, passes: int) -> float:
    """Return the median seconds of a step's slices and logits of `batch` sequences, alone."""
    step = step_of(model, batch)
    with torch.inference_mode():
        return statistics.median([device_seconds(step, model.device) for _ in range(passes + 1)][1:])


Between = Callable[..., None]  # of the rows of a layer, and o


def step_of(model: SplitModel, batch: int, between: Between | None = None) -> Callable[[], None]:
    """Return a function that runs all slices of a step; it calls `between` with q, k, v and o of every layer."""
    ids = torch.arange(batch, device=model.device) % model.vocab_size
    outs = [torch.zeros(batch, s.out_columns, dtype=model.dtype, device=model.device) for s in model.attends]

    def step() -> None:
        o: Tensor | None = None
        context: tuple[Tensor, ...] = ids, ids * 0 + 7, torch.arange(batch, device=model.device)
        for layer, out in enumerate(outs):
            rows, context = model.slice(layer, o, context)
            if between:
                between(*rows, out)
            o = out
        assert o is not None, "a model has layers"
        model.logits(o, context)

    return step


def transfers(model: SplitModel, copies: Copies, batch: int, passes: int) -> Iterator[Case]:
    """Yield what the copies of one lane add to the slices of another; both are told to the device at once."""
    s = max(model.attends, key=lambda s: s.row_columns)
    there = torch.zeros(batch, s.row_columns, dtype=model.dtype, device=model.device)
    back = torch.zeros(batch, s.out_columns, dtype=model.dtype, device=model.device)
    hosts = [copies.pinned(batch, x.shape[1], x.dtype) for x in (there, back)]
    last: list[Waitable] = []

    def copy(*_: Tensor) -> None:
        if last:  # o of the other lane comes back while this one's slice runs
            copies.into([(back, hosts[1])], last.pop())
        last.append(copies.out([(hosts[0], there)]))

    def only_copies() -> None:
        for _ in model.attends:
            copy()

    alone, beside, added, ratios = step_of(model, batch), step_of(model, batch, copy), [], []
    with torch.inference_mode():
        for _ in range(passes + 1):
            own, step, both = (device_seconds(work, model.device) for work in (only_copies, alone, beside))
            added.append(max(both - step, 0.0))
            ratios.append(added[-1] / own)
    name = f"transfers, {batch} sequences: what they add to a step"
    yield case(name, [t * 1e3 for t in added[1:]], "ms a step", "the copies alone", ratios[1:])


def jobs(
    site: Site,
    work: Workload,
    among: Sequence[Arrangement],
    flags: Sequence[str],
    batch: int,
    slice_seconds: dict[int, float],
) -> Iterator[Case]:
    """Yield tokens/s of whole jobs, against the first arrangement.

    Args:
        site: Where everything lies.
        work: The rows.
        among: Arrangements.
        flags: Of all of them.
        batch: B.
        slice_seconds: Of a lane's step, by number of lanes.
    """
    made, first = work.rows * work.new, 0.0
    for world in among:
        run = Hpcdecode(site, world.ranks, [*flags, *world.flags]).run(work)
        rate = made / run.seconds
        first = first or rate
        yield case(f"job, {world.name}", [rate], "tokens/s", among[0].name, [rate / first])
        if world.lanes:
            steps = (made - work.rows) / (batch // world.lanes)
            busy = steps * slice_seconds[world.lanes] / run.decode_seconds
            name = f"S-rank idle while rows decode, {world.name}"
            yield case(name, [100 * (1 - busy)], "% of the time", "slices alone, busy", [busy])
    if torch.cuda.is_available():
        rate = _by_transformers(site.checkpoint, work.prompts(site.shape), work.new)
        yield case("job, transformers' continuous batching", [rate], "tokens/s", among[0].name, [rate / first])


def _by_transformers(folder: Path, prompts: list[list[int]], new: int) -> float:
    """Return tokens/s of transformers' continuous batching on the GPU."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = loaded.eval().to("cuda")  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model.generate_batch(prompts[:4], generation_config=config)
    return len(prompts) * new / seconds_of(lambda: model.generate_batch(prompts, generation_config=config))
