"""Recurrent layers for tests, and the calls of a state store."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hpcdecode._attn_cpu import StateStore
from hpcdecode.attention.cpu_states import native_recurrent
from hpcdecode.attention.recurrent_shapes import RecurrentShape, RecurrentWeights

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

LAYERS = {
    "gated_delta_net": RecurrentShape(8, 4, 128, 128, 4, True, True, True, 128**-0.5, 1, True),
    "kda": RecurrentShape(3, 3, 128, 128, 4, True, True, True, 128**-0.5, 128, True),
    "mamba2": RecurrentShape(24, 2, 128, 64, 4, True, has_beta=True),
    "mamba1": RecurrentShape(200, 1, 16, 1, decay_dim=16, has_beta=True, has_rate=True),
    "short_convolution": RecurrentShape(1, 1, 0, 100, 3),
    "retention": RecurrentShape(4, 2, 24, 40, decay_dim=24),
    "odd_delta": RecurrentShape(6, 2, 7, 5, 3, True, True, False, 0.7, 7, True, True),
    "compressor": RecurrentShape(100, 100, 0, 1, compress_rate=16),
    "overlapping_compressor": RecurrentShape(37, 37, 0, 1, compress_rate=4, overlaps=True),
    "odd_lanes": RecurrentShape(42, 3, 5, 1, 2, False, True, True, 0.5, 1, True),
}


def open_store(
    layers: list[RecurrentShape],
    weights: list[RecurrentWeights],
    dtype: torch.dtype,
    *,
    max_sequences: int = 8,
    threads: int = 1,
    nodes: tuple[int, ...] = (),
) -> StateStore:
    isa, cpus = os.environ.get("HPCDECODE_ISA", ""), sorted(os.sched_getaffinity(0))
    threads = len(nodes) or threads
    own = [cpus[i % len(cpus)] for i in range(threads)] if nodes else []
    shapes, kept = native_recurrent(layers), layers[0].state_dtype if layers else "float32"
    ahead = layers[0].lookahead if layers else 0
    about = DTYPES[dtype], kept, max_sequences, threads, own, isa, list(nodes), False, None, ahead
    return StateStore(shapes, weights, *about)


def take(
    store: StateStore, layer: RecurrentShape, slots: list[int], rows: list[Tensor], index: int = 0
) -> list[Tensor]:
    """Return the outputs of each slot's new rows at one layer; the slots have been extended."""
    counts = [len(r) for r in rows]
    out = torch.full((sum(counts), layer.out_columns), float("nan"), dtype=rows[0].dtype)
    store.run(index, slots, counts, torch.cat(rows), out)
    return list(out.split(counts))


def step(store: StateStore, layer: RecurrentShape, slots: list[int], rows: list[Tensor]) -> list[Tensor]:
    """Extend slots of a store of one layer by rows, and return their outputs."""
    store.extend(slots, [len(r) for r in rows])
    return take(store, layer, slots, rows)
