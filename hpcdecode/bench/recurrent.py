"""`hpcdecode bench recurrent`: recurrent states against plainly reading and writing the same memory.

Every shape is verified against float64 first. In decode, a token of every sequence goes through one layer, over more
state than the caches hold; passes alternate with plain reading and writing on the same threads. So do steps with
guesses and steps of one token, by the tokens that they take on. In prefill one prompt goes through, whose state stays
in cache; passes alternate with a float32 GEMM, by FLOP/s. Ratios are medians of the pairs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from itertools import product
from statistics import median

import numpy as np
import torch
from msgspec.structs import replace

from hpcdecode._attn_cpu import StateStore
from hpcdecode.attention.base import isa
from hpcdecode.attention.cpu_states import native_recurrent
from hpcdecode.attention.recurrent_shapes import STATE_DTYPES, RecurrentShape
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.stateful_layers import KNOWN, exact, random_numbers, random_rows
from hpcdecode.planning.layer_work import recurrence_flop
from hpcdecode.report.benchmark import case as result
from hpcdecode.report.benchmark import machine, seconds_of

_TOLERANCE = 2**-7  # share of the largest output; bfloat16 rows and outputs
_GEMM = (256, 1024, 1024)  # of torch, float32
_GUESSES, _RIGHT = 4, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)")
    parser.add_argument("--shape", nargs="+", default=list(KNOWN), choices=list(KNOWN))
    help = "data types of states (default: float32)"
    parser.add_argument("--mamba-ssm-cache-dtype", nargs="+", default=["float32"], choices=STATE_DTYPES, help=help)
    parser.add_argument("--mebibytes", type=int, default=256, help="state per case; more than the caches hold")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--passes", type=int, default=15)


def run(args: argparse.Namespace) -> Report:
    """Verify, then measure every case."""
    cases: list[Case] = []
    for name, state_dtype in product(args.shape, args.mamba_ssm_cache_dtype):
        layer = replace(KNOWN[name], state_dtype=state_dtype)
        label = name if state_dtype == "float32" else f"{name}, states in {state_dtype}"
        verify(layer)
        for threads in args.threads:
            cases += decode(label, layer, threads, args.mebibytes << 20, args.passes)
            cases.append(beside_guesses(label, layer, threads, args.mebibytes << 20, args.passes))
            cases.append(prefill(label, layer, threads, args.tokens, args.passes))
    return {"bench": "recurrent", "machine": machine(), "cases": cases}


def opened(layer: RecurrentShape, sequences: int, threads: int) -> StateStore:
    """Return a store of one layer with bfloat16 rows."""
    cpus = sorted(os.sched_getaffinity(0))
    own = cpus[:threads] if threads <= len(cpus) else []
    numbers = random_numbers(layer)
    return StateStore(
        native_recurrent([layer]),
        [numbers],
        "bfloat16",
        layer.state_dtype,
        sequences,
        threads,
        own,
        isa(),
        [],
        False,
        None,
        layer.lookahead,
    )


def stepper(store: StateStore, layer: RecurrentShape, sequences: int, tokens: int) -> Callable[[], None]:
    """Return a call that takes the next `tokens` tokens of each of the sequences through the layer."""
    slots, counts = np.arange(sequences, dtype=np.int32), np.full(sequences, tokens, np.int32)
    rows = random_rows(layer, tokens, torch.bfloat16).repeat(sequences, 1)
    out = torch.empty(len(rows), layer.out_columns, dtype=torch.bfloat16)

    def step() -> None:
        store.extend(slots, counts)
        store.run(0, slots, counts, rows, out)

    return step


def verify(layer: RecurrentShape) -> None:
    """Compare a sequence of 40 tokens, a prompt and single ones, with float64.

    Raises:
        RuntimeError: If they differ.
    """
    store, rows = opened(layer, 1, 1), random_rows(layer, 40, torch.bfloat16)
    out = torch.empty(len(rows), layer.out_columns, dtype=torch.bfloat16)
    for part, to in zip(rows.split([35, 1, 1, 3]), out.split([35, 1, 1, 3]), strict=True):
        store.extend([0], [len(part)])
        store.run(0, [0], [len(part)], part, to)
    expected = exact(layer, random_numbers(layer), rows)
    error = (expected - out.double()).abs().max().item()
    if not error <= _TOLERANCE * expected.abs().max().item():
        raise RuntimeError(f"{layer}: error {error:.3g} is out of bounds")


def decode(name: str, layer: RecurrentShape, threads: int, state_bytes: int, passes: int) -> list[Case]:
    """Return GB/s, and microseconds of a sequence, with one token of each, against reading and writing the memory."""
    sequences = max(1, state_bytes // opened(layer, 1, 1).state_bytes)
    store = opened(layer, sequences, threads)
    step = stepper(store, layer, sequences, 1)
    step()
    step()
    rates, ratios, times = [], [], []
    for _ in range(passes):
        floor = 2 * sequences * store.state_bytes / store.rewrite_seconds()
        bytes_before, seconds_before = store.bytes_moved, store.run_seconds
        step()
        seconds = store.run_seconds - seconds_before
        rates.append((store.bytes_moved - bytes_before) / seconds)
        ratios.append(rates[-1] / floor)
        times.append(seconds / sequences * 1e6)
    label = f"{name}, {sequences} sequences, {threads} threads"
    reference = "plain reading and writing, same threads"
    return [
        result(label, [r / 1e9 for r in rates], "GB/s", reference, ratios),
        result(label, times, "us a sequence and layer", reference, ratios),
    ]


def beside_guesses(name: str, layer: RecurrentShape, threads: int, state_bytes: int, passes: int) -> Case:
    """Return microseconds of a sequence with a token and some guesses, some of them right, against one token each."""
    sequences = max(1, state_bytes // opened(layer, 1, 1).state_bytes)
    store = opened(replace(layer, lookahead=_GUESSES), sequences, threads)
    plain, step = (stepper(store, layer, sequences, tokens) for tokens in (1, 1 + _GUESSES))
    times, ratios = [], []
    for _ in range(passes + 1):
        plain()  # takes on what the guesses before left, and is not counted
        alone = seconds_of(plain)
        step()
        for slot in range(sequences):
            store.truncate(slot, store.length(slot) - (_GUESSES - _RIGHT))
        beside = seconds_of(step)
        times.append(beside / sequences * 1e6)
        ratios.append((1 + _RIGHT) * alone / beside)
    label = f"{name}, {sequences} sequences, {_GUESSES} guesses, {_RIGHT} right, {threads} threads"
    return result(label, times[1:], "us a sequence and layer", "one token each, by tokens", ratios[1:])


def prefill(name: str, layer: RecurrentShape, threads: int, tokens: int, passes: int) -> Case:
    """Return microseconds a token of one prompt, with FLOP/s against those of a float32 GEMM on as many threads."""
    step = stepper(opened(layer, 1, threads), layer, 1, tokens)
    m, n, k = _GEMM
    a, b = torch.randn(m, k), torch.randn(k, n)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for call in (step, lambda: torch.mm(a, b)):
            call()
        times, ratios = [], []
        for _ in range(passes):
            gemm_rate = 2 * m * n * k / median(seconds_of(lambda: torch.mm(a, b)) for _ in range(3))
            begun = time.perf_counter()
            step()
            seconds = time.perf_counter() - begun
            times.append(seconds / tokens * 1e6)
            ratios.append(recurrence_flop(layer) * tokens / seconds / gemm_rate)
    finally:
        torch.set_num_threads(before)
    label = f"{name}, a prompt of {tokens} tokens, {threads} threads"
    return result(label, times, "us a token and layer", "torch's float32 GEMM, by FLOP/s", ratios)
