"""`hpcdecode bench attention`: GB/s of the R-part against the read bandwidth measured in the same run.

Every case is verified against float64 first. Passes of attention and of plain reading alternate, so that both see the
same machine. They read the same memory on the same threads. The ratio is the median of the pairs, its spread their
quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hpcdecode.attention import base as attention
from hpcdecode.attention.base import KvCache
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.bench import chosen, filled, latent, mixed
from hpcdecode.bench.output import Case, Report
from hpcdecode.report.benchmark import case as result
from hpcdecode.report.benchmark import machine, seconds_of


@dataclass(frozen=True)
class AttentionCase:
    """Sequences over one layer, whose K and V are read once a pass.

    Attributes:
        name: As printed.
        shape: Of the layer.
        kv_dtype: Data type of the KV cache.
        lengths: Tokens of every sequence.
        threads: That attend.
    """

    name: str
    shape: LayerShape
    kv_dtype: str
    lengths: tuple[int, ...]
    threads: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)")
    parser.add_argument(
        "--kv-dtype", nargs="+", default=["bfloat16", "int8", "k8v4", "int4"], choices=attention.KV_DTYPES
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--group", type=int, nargs="+", default=[1, 4, 8], help="query heads per KV head")
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768], help="tokens per sequence")
    help = "models whose attention over latents is measured (default: all)"
    parser.add_argument("--latent", nargs="*", default=list(latent.MODELS), choices=latent.MODELS, help=help)
    help = "models whose attention to tokens that an indexer chooses is measured (default: all)"
    parser.add_argument("--chosen", nargs="*", default=list(chosen.MODELS), choices=chosen.MODELS, help=help)
    parser.add_argument("--mebibytes", type=int, default=256, help="KV per case; more than the caches hold")
    parser.add_argument("--passes", type=int, default=9)
    help = "measure steps that also prefill instead: all attention of a layer at once, against one kind after the other"
    parser.add_argument("--mixed", action="store_true", help=help)
    help = "with --mixed: threads for which the times of items are played back (default: 16 64)"
    parser.add_argument("--played-threads", type=int, nargs="*", default=[16, 64], metavar="N", help=help)
    parser.add_argument("--no-sdpa", action="store_true", help="skip torch scaled_dot_product_attention")


def run(args: argparse.Namespace) -> Report:
    """Verify, then measure every case."""
    if args.mixed:
        return {
            "bench": "attention",
            "machine": machine(),
            "cases": mixed.cases(args.threads, args.played_threads, args.passes),
        }
    cases: list[Case] = []
    for threads in args.threads:
        for case in table(args, threads):
            filled.verify(opened(case, filled.LENGTHS), case.shape, case.kv_dtype)
            cases += measure(case, args.passes)
        cases += latents(args, threads)
        for name in args.chosen:
            for kv_dtype in (d for d in args.kv_dtype if d in attention.LATENT_KV_DTYPES):
                nbytes = args.mebibytes << 20
                cases += chosen.measure(name, kv_dtype, args.context, nbytes, threads, args.passes)
        if not args.no_sdpa:
            cases.append(against_sdpa(threads, args.passes))
    return {"bench": "attention", "machine": machine(), "cases": cases}


def table(args: argparse.Namespace, threads: int) -> list[AttentionCase]:
    """Return uniform batches of every shape that is asked for, and one whose lengths spread 100:1."""
    out = []
    for kv_dtype in args.kv_dtype:
        for dim in args.head_dim:
            for group in args.group:
                shape = LayerShape(8 if group < 8 else 4, dim, dim, (8 if group < 8 else 4) * group, dim**-0.5)
                for context in args.context:
                    tokens = (args.mebibytes << 20) / bytes_per_token([shape], kv_dtype)
                    lengths = (context,) * max(1, round(tokens / context))
                    out.append(
                        AttentionCase(f"{kv_dtype} {label(shape)} context {context}", shape, kv_dtype, lengths, threads)
                    )
    shape = LayerShape(8, 128, 128, 8, 128**-0.5)
    spread = np.geomspace(1, 100, 64)
    tokens = (args.mebibytes << 20) / bytes_per_token([shape], "bfloat16")
    lengths = tuple(max(1, int(x)) for x in spread / spread.sum() * tokens)
    out.append(AttentionCase("bfloat16 MHA d128 64 lengths 1:100", shape, "bfloat16", lengths, threads))
    return out


def latents(args: argparse.Namespace, threads: int) -> list[Case]:
    """Return the cases of latents; their expanded K and V take as many bytes as other cases do."""
    out: list[Case] = []
    for name in args.latent:
        for kv_dtype in (d for d in args.kv_dtype if d in attention.LATENT_KV_DTYPES):
            tokens = (args.mebibytes << 20) / bytes_per_token([latent.MODELS[name].expanded], kv_dtype)
            context = min(args.context)
            lengths = (context,) * max(1, round(tokens / context))
            out += latent.measure(name, kv_dtype, lengths, threads, args.passes)
    return out


def label(shape: LayerShape) -> str:
    """Return a short name of a shape, such as GQA4 d128."""
    return f"{'MHA' if shape.group == 1 else f'GQA{shape.group}'} d{shape.k_dim}"


def opened(case: AttentionCase, lengths: tuple[int, ...]) -> KvCache:
    """Return an empty KV cache with room for sequences of `lengths` tokens."""
    return open_kv_cache(
        [case.shape],
        kv_dtype=case.kv_dtype,
        capacity_tokens=filled.capacity(lengths),
        max_sequences=len(lengths),
        threads=case.threads,
    )


def measure(case: AttentionCase, passes: int) -> list[Case]:
    """Return GB/s and tokens/s of a case, against plain reading of the same memory."""
    kv_cache = opened(case, case.lengths)
    filled.fill(kv_cache, case.shape, case.lengths)
    slots, counts, qkv, out = filled.decode(case.shape, len(case.lengths))
    kv_cache.attend(0, slots, counts, qkv, out)
    assert isinstance(kv_cache, CpuKvCache), "plain reading: expected the KV cache of CPUs"
    rates, ratios, seconds = [], [], []
    for _ in range(passes):
        plain_rate = kv_cache.bytes / kv_cache.read_seconds()
        before, begun = kv_cache.bytes_read, time.perf_counter()
        kv_cache.attend(0, slots, counts, qkv, out)
        seconds.append(time.perf_counter() - begun)
        rates.append((kv_cache.bytes_read - before) / seconds[-1])
        ratios.append(rates[-1] / plain_rate)
    name = f"{case.name}, {case.threads} threads"
    tokens = [len(case.lengths) / s for s in seconds]
    return [
        result(name, [r / 1e9 for r in rates], "GB/s", "plain reading, same threads", ratios),
        result(name, tokens, "tokens/s of one layer", "plain reading, same threads", ratios),
    ]


def against_sdpa(threads: int, passes: int) -> Case:
    """Return tokens/s of 64 sequences of 128 to 4096 tokens, GQA 4, against torch's fastest way on as many threads."""
    shape = LayerShape(8, 128, 128, 32, 128**-0.5)
    lengths = tuple(int(x) for x in np.linspace(128, 4096, 64))
    case = AttentionCase(
        f"bfloat16 {label(shape)} 64 lengths 128..4096, {threads} threads", shape, "bfloat16", lengths, threads
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        reference, attend = fastest_sdpa(shape, lengths)
        kv_cache = opened(case, lengths)
        filled.fill(kv_cache, shape, lengths)
        slots, counts, qkv, out = filled.decode(shape, len(lengths))
        ratios, rates = [], []
        for _ in range(max(3, passes // 3)):
            theirs = seconds_of(attend)
            ours = seconds_of(lambda: kv_cache.attend(0, slots, counts, qkv, out))
            rates.append(len(lengths) / ours)
            ratios.append(theirs / ours)
    finally:
        torch.set_num_threads(before)
    return result(case.name, rates, "tokens/s of one layer", reference, ratios)


Way = Callable[[], object]  # attends once


def fastest_sdpa(shape: LayerShape, lengths: tuple[int, ...]) -> tuple[str, Way]:
    """Return name and call of the fastest of torch's three ways; expanding and padding K and V is off the clock."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    n, longest, group = len(lengths), max(lengths), shape.group
    q = torch.randn(n, shape.q_heads, 1, shape.k_dim).bfloat16()
    rows = torch.randn(2, shape.kv_heads, longest, shape.k_dim).bfloat16()

    def by_sequence() -> Way:
        kv = [rows[:, None, :, :m].clone() for m in lengths]
        return lambda: [sdpa(q[i : i + 1], k, v, enable_gqa=True) for i, (k, v) in enumerate(kv)]

    def expanded() -> Way:
        kv = [rows[:, None, :, :m].repeat_interleave(group, dim=2) for m in lengths]
        return lambda: [sdpa(q[i : i + 1], k, v) for i, (k, v) in enumerate(kv)]

    def padded() -> Way:
        k, v = (x.expand(n, *x.shape).contiguous() for x in rows)
        mask = (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None]
        return lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True)

    ways: dict[str, Callable[[], Way]] = {
        "sequence by sequence": by_sequence,
        "sequence by sequence, heads expanded": expanded,
        "one padded batch": padded,
    }
    times = {}
    for name, make in ways.items():  # one at a time: the expanded copies are large
        call = make()
        call()
        times[name] = min(seconds_of(call) for _ in range(2))
    best = min(times, key=lambda name: times[name])
    return f"torch scaled_dot_product_attention, {best}", ways[best]()
