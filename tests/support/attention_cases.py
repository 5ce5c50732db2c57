"""Batches of sequences for the attention tests, and their float64 answers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.plain import attend_rows
from hpcdecode.attention.reference import stored_rows
from hpcdecode.attention.shapes import LayerShape


def shape(kv_heads, k_dim, group, v_dim=None, **rest) -> LayerShape:
    return LayerShape(kv_heads, k_dim, v_dim or k_dim, kv_heads * group, k_dim**-0.5, **rest)


@dataclass
class Batch:
    """Sequences that already hold lengths[i] - counts[i] tokens and now attend from their last counts[i]."""

    shape: LayerShape
    lengths: list[int]
    counts: list[int]
    rows: list[torch.Tensor]  # of each sequence: [length, q | k | v]
    sinks: torch.Tensor | None

    def new_rows(self, which=None) -> torch.Tensor:
        which = range(len(self.rows)) if which is None else which
        return torch.cat([self.rows[i][self.lengths[i] - self.counts[i] :] for i in which])


def make_batch(shape: LayerShape, lengths, counts, dtype=torch.float32, seed=0) -> Batch:
    rows, sinks = _random(shape.q_columns + shape.kv_columns, shape.q_heads, tuple(lengths), dtype, seed)
    return Batch(shape, list(lengths), list(counts), [row.clone() for row in rows], sinks if shape.sinks else None)


@lru_cache(maxsize=8)  # tests of one shape follow each other
def _random(columns: int, heads: int, lengths: tuple[int, ...], dtype: torch.dtype, seed: int):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, columns, generator=g).to(dtype) for n in lengths], torch.randn(heads, generator=g)


def ints(values) -> np.ndarray:
    return np.asarray(list(values), dtype=np.int32)


def pretend(*nodes) -> dict:
    """Options of a store with a thread on each of these NUMA nodes, whatever the machine has."""
    cpus = sorted(os.sched_getaffinity(0))
    return {"threads": len(nodes), "cpus": [cpus[i % len(cpus)] for i in range(len(nodes))], "nodes": list(nodes)}


def poison(store, shape: LayerShape, layer=0, device="cpu") -> None:
    """Leaves infinities in every block."""
    tokens = store.capacity_tokens
    store.extend(ints([0]), ints([tokens]))
    store.append(layer, ints([0]), ints([tokens]), torch.full((tokens, shape.kv_columns), float("inf"), device=device))
    store.release(ints([0]))


def run_batch(
    batch: Batch, kv_dtype: str, *, which=None, poisoned=True, layers=None, layer=0, device="cpu", **options
) -> torch.Tensor:
    """Output rows of the batch's sequences `which`, in that order, from a fresh store."""
    which = list(range(len(batch.rows)) if which is None else which)
    s = batch.shape
    tokens = sum(batch.lengths[i] + options.get("block_tokens", 64) for i in which)
    options = {"capacity_tokens": tokens, "max_sequences": len(which), "device": device, **options}
    store = open_kv_cache(layers or [s], kv_dtype=kv_dtype, **options)
    if poisoned:
        poison(store, s, layer, device)
    slots = ints(range(len(which)))
    old, new = (
        ints(x) for x in zip(*((batch.lengths[i] - batch.counts[i], batch.counts[i]) for i in which), strict=True)
    )
    store.extend(slots, old)
    kv = torch.cat([batch.rows[i][:n, s.q_columns :] for i, n in zip(which, old, strict=True)])
    store.append(layer, slots, old, kv.to(device))
    store.extend(slots, new)
    qkv = batch.new_rows(which).to(device)
    wide = torch.full((qkv.shape[0], s.out_columns + 3), float("nan"), dtype=qkv.dtype, device=device)
    store.attend(layer, slots, new, qkv, wide[:, : s.out_columns], batch.sinks)
    assert wide[:, s.out_columns :].isnan().all(), "wrote past the end of a row"
    store.check()
    return wide[:, : s.out_columns].cpu()


def forked_and_moved(batch: Batch) -> torch.Tensor:
    """Output rows of the last token of the batch's sequence, of a fork of it, and of one to which its blocks moved."""
    s, old = batch.shape, batch.lengths[0] - 1
    store = open_kv_cache([s], kv_dtype="float32", capacity_tokens=1024, max_sequences=3)
    store.extend([0], [old])
    store.append(0, [0], [old], batch.rows[0][:old, s.q_columns :].contiguous())
    store.fork(0, 1)
    store.extend([2], [old])
    room = torch.empty(-(-old // store.block_tokens) * store.native.block_bytes, dtype=torch.uint8)
    store.native.copy_out(0, 0, room)
    store.native.copy_in(2, 0, room)
    out = torch.empty(3, s.out_columns)
    store.extend([0, 1, 2], [1, 1, 1])
    store.attend(0, [0, 1, 2], [1, 1, 1], batch.rows[0][old:].repeat(3, 1), out, batch.sinks)
    return out


def layer_by_layer(batches: list[Batch], backend: str) -> list[torch.Tensor]:
    """Output rows of the new tokens of one sequence at layers that follow each other, float32; a batch is a layer's."""
    layers, length, count = [batch.shape for batch in batches], batches[0].lengths[0], batches[0].counts[0]
    store = open_kv_cache(layers, kv_dtype="float32", capacity_tokens=256, max_sequences=2, backend=backend)
    store.extend([0], [length])
    got = [torch.empty(count, s.out_columns) for s in layers]
    for i, batch in enumerate(batches):
        store.append(i, [0], [length], batch.rows[0][:, layers[i].q_columns :].contiguous())
        store.attend(i, [0], [count], batch.new_rows(), got[i])
    return got


def expected(batch: Batch, kv_dtype: str) -> torch.Tensor:
    """float64 attention over K and V as the cache holds them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other on a busy machine
    try:
        return _expected(batch, kv_dtype)
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=64)
def answered(shape: LayerShape, lengths, counts, dtype: torch.dtype, kv_dtype: str) -> tuple[Batch, torch.Tensor]:
    """A batch and what is `expected` of it, of all instruction sets and sizes of blocks: neither is to be changed."""
    batch = make_batch(shape, lengths, counts, dtype)
    return batch, expected(batch, kv_dtype)


def _expected(batch: Batch, kv_dtype: str) -> torch.Tensor:
    s, out = batch.shape, []
    for rows, length, count in zip(batch.rows, batch.lengths, batch.counts, strict=True):
        q = rows[length - count :, : s.own_q_columns].double().view(count, s.q_heads, s.k_dim)
        by = rows[length - count :, s.own_q_columns : s.q_columns].float()
        o = attend_rows(q, stored_rows(rows[:, s.q_columns :], s, kv_dtype), by, s, batch.sinks)
        out.append(o.reshape(count, -1))
    return torch.cat(out)
