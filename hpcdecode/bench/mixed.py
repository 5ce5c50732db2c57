"""Steps that decode and prefill: all attention of a layer in one parallel region, against one kind after the other.

Threads wait if a region has fewer items than threads, or at its end. On more threads than the machine has, items are
measured one by one on one thread, cut and in the order for so many threads, and their times are played back: without
the start of threads and what they take of each other's memory bandwidth.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import filled
from hpcdecode.bench.output import Case
from hpcdecode.report.benchmark import case as result

SHAPES = {
    "SmolLM2-135M": LayerShape(3, 64, 64, 9, 0.125),
    "Llama-3-8B": LayerShape(8, 128, 128, 32, 128**-0.5),
}
AGAINST = "one kind after the other"


@dataclass(frozen=True)
class MixedLoad:
    """What a step attends to.

    Attributes:
        name: As printed.
        decodes: Tokens of every sequence that decodes.
        chunks: (first token, tokens) of every chunk of a prompt.
    """

    name: str
    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]


def _spread(first: int, last: int, count: int) -> tuple[int, ...]:
    """Return `count` lengths between two, in equal ratios."""
    return tuple(int(x) for x in np.geomspace(first, last, count))


LOADS = (
    MixedLoad("32 rows of 1,024, 16 prompt tokens", (1024,) * 32, ((0, 16),)),
    MixedLoad("32 rows of 1,024, 512 tokens of a prompt of 4,096", (1024,) * 32, ((3584, 512),)),
    MixedLoad("32 rows of 1,024, a prompt of 1,024 and 16 of 16", (1024,) * 32, (*(((0, 16),) * 16), (0, 1024))),
    MixedLoad(
        "32 rows of 16 to 4,096, 12 prompts of 16 to 1,024",
        _spread(16, 4096, 32),
        tuple((0, n) for n in _spread(16, 1024, 12)),
    ),
)


class MixedStep:
    """One layer with the K and V of a load.

    Args:
        shape: Of the layer.
        load: What the step attends to.
        threads: For which work is cut.
    """

    def __init__(self, shape: LayerShape, load: MixedLoad, threads: int):
        prompts, n = [sum(chunk) for chunk in load.chunks], len(load.decodes)
        self.shape, self.load = shape, load
        lengths = (*load.decodes, *prompts)
        kv_cache = open_kv_cache(
            [shape],
            kv_dtype="bfloat16",
            capacity_tokens=filled.capacity(lengths),
            max_sequences=len(lengths),
            threads=threads,
            team=True,  # as a process of both roles has it
        )
        assert isinstance(kv_cache, CpuKvCache), "expected the KV cache of CPUs"
        self.kv_cache = kv_cache
        filled.fill(kv_cache, shape, lengths)
        self.prompts = CpuPromptAttention([shape], dtype="bfloat16", beside=kv_cache)
        self.packed = [torch.zeros(self.prompts.packed_bytes(0, tokens), dtype=torch.uint8) for tokens in prompts]
        self.starts, self.counts = ([chunk[i] for chunk in load.chunks] for i in (0, 1))
        generator = torch.Generator().manual_seed(2)
        rows = torch.randn(sum(self.counts), shape.row_columns, generator=generator).bfloat16()
        self.q, self.kv = rows[:, : shape.q_columns], rows[:, shape.q_columns :].contiguous()
        self.slots = np.arange(n, len(lengths), dtype=np.int32)
        self.decodes = filled.decode(shape, n)
        self.out = torch.empty(len(rows), shape.out_columns, dtype=torch.bfloat16)

    def apart(self) -> None:
        """Append, attend, and attend for prompts."""
        self.kv_cache.append(0, self.slots, np.array(self.counts, np.int32), self.kv)
        self.kv_cache.attend(0, *self.decodes)
        self.prompts.attend(0, self.packed, self.starts, self.counts, *self._qkv(), self.out)

    def together(self) -> None:
        """Do the same in one region."""
        appended = (self.slots, np.array(self.counts, np.int32), self.kv)
        beside = self.kv_cache.layer_rows(0, appended, self.decodes, None)
        self.prompts.attend(0, self.packed, self.starts, self.counts, *self._qkv(), self.out, None, None, beside)

    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.kv[:, : self.shape.k_columns], self.kv[:, self.shape.k_columns :]

    def verify(self) -> None:
        """Run both ways; raise RuntimeError if an output differs in any bit."""
        outputs = []
        for way in (self.apart, self.together):
            way()
            outputs.append([self.out.clone(), self.decodes.out.clone()])
        if not all(map(torch.equal, *outputs)):
            raise RuntimeError(f"bench attention --mixed: {self.load.name}: the two ways differ")

    def timed(self, way: Callable[[], None]) -> Timed:
        """Return what one run took, and the share of threads' time without work."""
        before, begun = self._clock(), time.perf_counter()
        way()
        seconds, after = time.perf_counter() - begun, self._clock()
        have, busy = (b - a for a, b in zip(before, after, strict=True))
        return Timed(seconds, 1 - busy / have)

    def _clock(self) -> tuple[float, float]:
        both = (self.kv_cache, self.prompts)
        return sum(x.thread_seconds for x in both), sum(x.busy_seconds for x in both)

    def items(self, passes: int) -> list[Item]:
        """Return the items of a region as they are taken, each with the least that it took in some passes."""
        native = self.prompts.native
        native.traces = True
        runs = []
        for _ in range(passes):
            self.together()
            runs.append({(kind, group, token): (estimate, s) for kind, group, token, estimate, s in native.items})
        native.traces = False
        return [Item(*key, runs[-1][key][0], min(run[key][1] for run in runs)) for key in runs[-1]]


class Timed(NamedTuple):
    """What a run took, and the share of the threads' time in which they had nothing to do."""

    seconds: float
    waits: float


class Item(NamedTuple):
    """An item of a region, as `_attn_cpu.Prefill.items` has it."""

    kind: str
    group: int
    token: int
    estimate: float
    seconds: float


def cases(threads: Sequence[int], played: Sequence[int], passes: int) -> list[Case]:
    """Return how long threads wait, and how long a layer takes.

    Args:
        threads: Numbers of threads that run.
        played: Numbers of threads for which items' times are played back.
        passes: Of every case.
    """
    out: list[Case] = []
    for model, shape in SHAPES.items():
        for load in LOADS:
            for n in threads:
                out += _measure(f"{model}, {load.name}, {n} threads", MixedStep(shape, load, n), passes)
            for n in played:
                out += _play(f"{model}, {load.name}, {n} threads played", MixedStep(shape, load, n), n, passes)
    return out


def _measure(name: str, step: MixedStep, passes: int) -> list[Case]:
    """Return the cases of threads that run."""
    step.verify()
    pairs = [(step.timed(step.apart), step.timed(step.together)) for _ in range(passes)]
    return _results(name, [a for a, _ in pairs], [b for _, b in pairs])


def _play(name: str, step: MixedStep, threads: int, passes: int) -> list[Case]:
    """Return the cases of threads whose items are played back."""
    items = step.items(passes)
    work = sum(item.seconds for item in items)
    took = [play_apart(items, threads), play_together(items, threads)]
    apart, together = ([Timed(seconds, 1 - work / threads / seconds)] for seconds in took)
    return _results(name, apart, together)


def _results(name: str, apart: list[Timed], together: list[Timed]) -> list[Case]:
    speed = [a.seconds / b.seconds for a, b in zip(apart, together, strict=True)]
    waits = [b.waits / max(a.waits, 1e-9) for a, b in zip(apart, together, strict=True)]
    return [
        result(f"{name}: time", [b.seconds * 1e6 for b in together], "us a layer", AGAINST, speed),
        result(f"{name}: threads wait", [b.waits * 100 for b in together], "% of their time", AGAINST, waits),
    ]


def play_apart(items: Sequence[Item], threads: int) -> float:
    """Return the seconds of four regions: append, attend, pack, attend for prompts; in the order of rows and heads."""
    append, pack = (_by_group(items, kind) for kind in ("append", "pack"))
    attend = [item.seconds for item in items if item.kind == "attend"]
    prompts = sorted((item for item in items if item.kind == "prompt"), key=lambda item: (item.group, -item.token))
    regions: list[Iterable[float]] = [append, attend, pack, [item.seconds for item in prompts]]
    return sum(_makespan(region, threads) for region in regions)


def _by_group(items: Sequence[Item], kind: str) -> Iterable[float]:
    sums: dict[int, float] = {}
    for item in items:
        if item.kind == kind:
            sums[item.group] = sums.get(item.group, 0.0) + item.seconds
    return sums.values()


def _makespan(seconds: Iterable[float], threads: int) -> float:
    """Return when the last item ends if each is taken by the thread that is free first."""
    free = [0.0] * threads
    for item in seconds:
        heapq.heapreplace(free, free[0] + item)
    return max(free)


def play_together(items: Sequence[Item], threads: int) -> float:
    """Return the seconds of one region, whose threads take items as `native/attn_cpu/region.cpp` has them do."""
    left = {kind: [i for i in reversed(items) if i.kind == kind] for kind in ("pack", "attend", "prompt", "append")}
    free, packed = [0.0] * threads, 0.0
    while any(left.values()):
        now = free[0]
        rows = left["attend"][-1].estimate if left["attend"] else -1.0
        ready = now >= packed and not left["pack"]
        prompts = left["prompt"][-1].estimate if ready and left["prompt"] else 0.0 if left["prompt"] else -1.0
        prompts = math.inf if left["pack"] else prompts
        if prompts > rows:
            kind = "pack" if left["pack"] else "append" if not ready and left["append"] else "prompt"
        else:
            kind = "attend" if left["attend"] else "append"
        begin = max(now, packed) if kind == "prompt" else now
        end = begin + left[kind].pop().seconds
        heapq.heapreplace(free, end)
        packed = max(packed, end) if kind == "pack" else packed
    return max(free)
