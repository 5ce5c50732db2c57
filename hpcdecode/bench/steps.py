"""`hpcdecode bench steps`: decode steps of one process, in one native call and layer by layer, in turn.

Models have random bfloat16 weights, true widths and few layers; they are made once and kept in the work folder. The
floor of a step is the time to read, at the bandwidth of plain reads on the same threads, the weights that its rows
touch and what they have cached, and to read and write their states. Rows touch 1 - (1 - k / E)^rows of the experts of a
layer, of which each chooses k of E. CPU milliseconds are those of all threads, also while they wait for each other.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention.open import open_layers
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import MixerShape, attention_shapes, state_bytes
from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.bench.mixed_configs import MIXED, WITH_EXPERTS
from hpcdecode.bench.mixed_models import mixed_checkpoint, touched_bytes
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.workload import default_folder
from hpcdecode.errors import UserError
from hpcdecode.exchange.base import joined
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.run.fused_step import FusedStep
from hpcdecode.report.benchmark import case, machine
from hpcdecode.system.bandwidth import read_rate

Step = Callable[[tuple[Tensor, ...]], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    models = (*MIXED, *WITH_EXPERTS)
    parser.add_argument("--model", nargs="+", default=["deepseek-v2", "granite-4-h"], choices=models)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="(default: 1 8 32)")
    parser.add_argument("--context", type=int, default=96, help="tokens of a row (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--passes", type=int, default=15, help="steps of each way (%(default)s)")
    help = "folder of the models (%(default)s)"
    parser.add_argument("--work", type=Path, default=default_folder(), metavar="DIR", help=help)


def run(args: argparse.Namespace) -> Report:
    """Measure every model with every number of rows.

    Raises:
        UserError: If a number is not positive.
    """
    for flag in ("rows", "context", "threads", "passes"):
        least = min(args.rows) if flag == "rows" else getattr(args, flag)
        if least < 1:
            raise UserError(f"--{flag}: expected 1 or more, got {least}")
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        cases: list[Case] = []
        for name in args.model:
            model = load_split(mixed_checkpoint(args.work, name), dtype="bfloat16")
            for rows in args.rows:
                cases += measure(name, model, rows, args.context, args.threads, args.passes)
            del model
    finally:
        torch.set_num_threads(before)
    return {"bench": "steps", "machine": machine(), "cases": cases}


class Seconds(NamedTuple):
    """What a step took by the clock, and of all threads."""

    wall: float
    cpu: float


def measure(name: str, model: SplitModel, rows: int, context: int, threads: int, passes: int) -> Iterator[Case]:
    """Yield milliseconds of a step by both ways, or by layers alone if the model is not fused."""
    decoding = Decoding(model, rows, context, threads, 2 * passes + 2)
    read = read_rate(sorted(os.sched_getaffinity(0))[:threads])
    floor = step_bytes(name, model.attends, rows, context) / read
    ways: dict[str, Step] = {"by layers": decoding.by_layers}
    if decoding.fused is not None:
        ways["fused"] = decoding.in_one_call
    taken: dict[str, list[Seconds]] = {way: [] for way in ways}
    for _ in range(passes + 1):
        for way, step in ways.items():
            taken[way].append(decoding.timed(step))
    for way, seconds in taken.items():
        about = f"{name}, {rows} rows of {context}, {threads} threads, {way}"
        own = seconds[1:]  # the first finds memory
        against = f"floor of {1e3 * floor:.1f} ms at {read / 1e9:.1f} GB/s"
        yield case(about, [1e3 * s.wall for s in own], "ms", against, [floor / s.wall for s in own])
        cpu = [floor * threads / s.cpu for s in own]
        yield case(about, [1e3 * s.cpu for s in own], "CPU ms", "floor, all threads", cpu)


class Decoding:
    """Rows that decode.

    Args:
        model: Model whose steps run.
        rows: Number of sequences.
        context: Tokens of each of them before the first step.
        threads: Threads of attention and states.
        steps: The most steps.

    Attributes:
        fused: The fused step, or None if the model has none.
    """

    def __init__(self, model: SplitModel, rows: int, context: int, threads: int, steps: int):
        self.model, self._at = model, context
        kept = [i for i, shape in enumerate(model.attends) if isinstance(shape, RecurrentShape)]
        self._kv_cache = open_layers(
            model.attends,
            [model.recurrent_weights(i) for i in kept],
            kv_dtype="bfloat16",
            capacity_tokens=1 << 40 if len(kept) == len(model.attends) else 2 * rows * (context + steps + 4096),
            max_sequences=rows,
            threads=threads,
            team=True,
        )
        self.fused = FusedStep.of(model, self._kv_cache)
        self._slots, self._ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
        ids = torch.randint(3, 400, (rows, context), generator=torch.Generator().manual_seed(0))
        for at in range(context):  # token by token, as states are in any model
            self._ids = self._next(self.by_layers((ids[:, at], torch.full((rows,), at), torch.arange(rows))))

    @staticmethod
    def _next(logits: Tensor) -> Tensor:
        return logits.argmax(1)

    def timed(self, step: Step) -> Seconds:
        """Run a step that goes on with the last one's tokens."""
        rows = len(self._slots)
        inputs = self._ids, torch.full((rows,), self._at), torch.arange(rows)
        wall, cpu = time.perf_counter(), time.process_time()
        self._ids = self._next(step(inputs))
        self._at += 1
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def by_layers(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the logits of a step, layer by layer."""
        self._kv_cache.extend(self._slots, self._ones)
        o: Tensor | None = None
        for i in range(len(self.model.attends)):
            rows, inputs = self.model.slice(i, o, inputs)
            o = self.model.empty_output(i, len(rows[0]))
            self._kv_cache.attend(i, self._slots, self._ones, joined(*rows), o, self.model.sinks(i))
        assert o is not None
        return self.model.logits(o, inputs)

    def in_one_call(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the logits of a fused step."""
        assert self.fused is not None
        self._kv_cache.extend(self._slots, self._ones)
        rows, inputs = self.model.slice(0, None, inputs)
        o, inputs, _ = self.fused.run(self._slots, self._ones, joined(*rows), inputs)
        return self.model.logits(o, inputs)


def step_bytes(name: str, shapes: Sequence[MixerShape], rows: int, context: int) -> float:
    """Return the bytes that a step must move: weights that its rows touch, what they have cached, states twice.

    Args:
        name: Name of the model.
        shapes: Shapes of its layers.
        rows: Rows of the step.
        context: Tokens of each.
    """
    kept = context * bytes_per_token(attention_shapes(shapes), "bfloat16") if attention_shapes(shapes) else 0.0
    return touched_bytes(name, rows) + rows * (kept + 2 * state_bytes(shapes))
