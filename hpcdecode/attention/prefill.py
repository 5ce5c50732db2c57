"""Attention of prompts on the CPU, in C++."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import KvCache, LayerShape, native_shapes
from hpcdecode.attention.cpu import CpuKvCache


class PromptAttention:
    """Causal attention of prompts over their own K and V, in C++. The caller holds those, packed as kernels read them.

    dtype, float32 or bfloat16, is that of every tensor. `beside`: a store on the same cores, whose threads are used;
    None: torch's, pinned to `cpus` as in `open_kv_cache`. The result of a token has the same bits however its prompt is
    cut into chunks, whatever it is batched with, on any number of threads. Raises ValueError on bad arguments.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        dtype: str,
        threads: int = 1,
        cpus: Sequence[int] | None = None,
        beside: KvCache | None = None,
    ) -> None:
        engine = beside._engine if isinstance(beside, CpuKvCache) else None
        forced = os.environ.get("HPCDECODE_ISA", "")
        self._native = _attn_cpu.Prefill(native_shapes(layers), dtype, threads, list(cpus or ()), forced, engine)
        self.isa = self._native.isa
        self.threads = self._native.threads
        self.layers = len(layers)
        self.device = "cpu"  # of all tensors

    def tokens_in(self, nbytes: int) -> int:
        """Tokens of a prompt whose K and V, of all layers, take at most `nbytes`."""
        tokens = 1 << 12
        return nbytes * tokens // sum(self.packed_bytes(layer, tokens) for layer in range(self.layers))

    def packed_bytes(self, layer: int, tokens: int) -> int:
        """Bytes that hold K and V of `tokens` tokens of one prompt at `layer`."""
        return self._native.packed_bytes(layer, tokens)

    def attend(
        self,
        layer: int,
        packed: list[Any],
        starts: Any,
        counts: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        sinks: Any = None,
        skipped_queries: Any = None,
    ) -> None:
        """Add the chunks' K and V to their prompts' and attend from tokens starts[i], starts[i] + 1, ... of prompt i.

        packed[i]: uint8, at least packed_bytes(layer, starts[i] + counts[i]) long, with the tokens before starts[i].
        q [T, q_heads * k_dim], k [T, kv_heads * k_dim], v [T, kv_heads * v_dim] and out [T, q_heads * v_dim], which is
        overwritten: the chunks' tokens in order, T = sum(counts). sinks: as KvCache.attend.
        skipped_queries: how many of a chunk's first tokens need no result; their rows of out are left as they are.
        """
        self._native.attend(layer, packed, starts, counts, q, k, v, out, sinks, skipped_queries)
