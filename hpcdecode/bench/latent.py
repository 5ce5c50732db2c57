"""Attention over latents against the limits of the machine, and against the same attention over expanded K and V.

A latent has one KV head for all query heads, so a byte that is read takes part in many products: the limit is the
of the times for reading and for a GEMM of as many products, on the same threads. Passes of all sides alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import filled
from hpcdecode.bench.limits import by_onednn, by_packed_weights, offers_packed_weights
from hpcdecode.bench.output import Case
from hpcdecode.report.benchmark import case as result
from hpcdecode.report.benchmark import seconds_of

_GEMM = (256, 1024, 1024)  # tokens, inputs, outputs


class Model(NamedTuple):
    """The attention of a model with latents.

    Attributes:
        heads: Query heads.
        rank: Elements of the latent.
        shared: Elements of K that all heads share.
        own: Elements of K that each head has besides, if K is expanded.
        v_dim: Elements of V of a head, if V is expanded.
    """

    heads: int
    rank: int
    shared: int
    own: int
    v_dim: int

    @property
    def latent(self) -> LayerShape:
        """Return the shape of attention over latents."""
        return LayerShape(1, self.rank + self.shared, self.rank, self.heads, self._scale, latent=True)

    @property
    def expanded(self) -> LayerShape:
        """Return the shape of attention over expanded K and V."""
        return LayerShape(self.heads, self.own + self.shared, self.v_dim, self.heads, self._scale)

    @property
    def _scale(self) -> float:
        return float((self.own + self.shared) ** -0.5)


MODELS = {"deepseek-v3": Model(128, 512, 64, 128, 128), "glm-4.7-flash": Model(20, 512, 64, 192, 256)}


class Side(NamedTuple):
    """A filled KV cache, and a call that attends from one token of each of its sequences."""

    kv_cache: CpuKvCache
    attend: Callable[[], None]


def measure(name: str, kv_dtype: str, lengths: tuple[int, ...], threads: int, passes: int) -> Iterator[Case]:
    """Verify a model's latents, then yield GFLOP/s against the limit, and tokens/s against expanded K and V.

    Args:
        name: One of MODELS.
        kv_dtype: Data type of both KV caches.
        lengths: Tokens of every sequence.
        threads: Threads that attend.
        passes: Number of measurements.
    """
    model = MODELS[name]
    filled.verify(opened(model.latent, kv_dtype, filled.LENGTHS, threads), model.latent, kv_dtype)
    ours, theirs = (prepared(shape, kv_dtype, lengths, threads) for shape in (model.latent, model.expanded))
    flops = 2 * model.heads * (2 * model.rank + model.shared) * sum(lengths)
    limits, seconds, speedups = [], [], []
    for _ in range(passes):
        ours.attend()  # wakes the threads, as the layer before does in a step
        begun, before = time.perf_counter(), ours.kv_cache.bytes_read
        ours.attend()
        seconds.append(time.perf_counter() - begun)
        nbytes = ours.kv_cache.bytes_read - before
        reading = nbytes * ours.kv_cache.read_seconds() / ours.kv_cache.bytes
        limits.append(max(reading, flops / gemm_rate(threads)))
        speedups.append(seconds_of(theirs.attend) / seconds[-1])
    ratios = [limit / own for limit, own in zip(limits, seconds, strict=True)]
    about = f"{kv_dtype} {name}, {model.heads} heads, context {lengths[0]}, {threads} threads"
    limit = "the larger of plain reading and a GEMM, same threads"
    yield result(f"{about}, latents", [flops / s / 1e9 for s in seconds], "GFLOP/s", limit, ratios)
    tokens = [len(lengths) / s for s in seconds]
    yield result(f"{about}, latents", tokens, "tokens/s of one layer", "expanded K and V", speedups)


def opened(shape: LayerShape, kv_dtype: str, lengths: tuple[int, ...], threads: int) -> CpuKvCache:
    """Return an empty KV cache of one layer for sequences of these lengths."""
    capacity, count = filled.capacity(lengths), len(lengths)
    cache = open_kv_cache([shape], kv_dtype=kv_dtype, capacity_tokens=capacity, max_sequences=count, threads=threads)
    assert isinstance(cache, CpuKvCache), "expected the KV cache of CPUs"
    return cache


def prepared(shape: LayerShape, kv_dtype: str, lengths: tuple[int, ...], threads: int) -> Side:
    """Return a filled KV cache that has attended once, and what attends again."""
    cache = opened(shape, kv_dtype, lengths, threads)
    filled.fill(cache, shape, lengths)
    slots, counts, qkv, out = filled.decode(shape, len(lengths))

    def attend() -> None:
        cache.attend(0, slots, counts, qkv, out)

    attend()
    return Side(cache, attend)


def gemm_rate(threads: int) -> float:
    """Return the FLOP/s of a bfloat16 GEMM whose weights a cache holds, the best of three."""
    tokens, inputs, outputs = _GEMM
    make = by_packed_weights if offers_packed_weights() else by_onednn
    gemm = make(torch.randn(tokens, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gemm()
        return 2 * float(np.prod(_GEMM)) / min(seconds_of(gemm) for _ in range(3))
    finally:
        torch.set_num_threads(before)
