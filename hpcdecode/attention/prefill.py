"""Attention of prompts on the CPU: `native/attn_cpu` in C++."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import FloatArray, IntArray, KvCache, LayerRows, LayerSeconds, Matrix, native_shapes
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.shapes import LayerShape


class CpuPromptAttention:
    """A `PromptAttention` on CPUs.

    A token's result has the same bits however its prompt is cut into chunks, whatever it is batched with, and on any
    number of threads.

    Args:
        layers: Shapes of the attention layers.
        dtype: float32 or bfloat16, of every tensor.
        threads: Number of threads, the calling one included.
        cpus: One CPU per thread to pin workers to, or None.
        beside: A KV cache on the same cores whose threads are used, or None for torch's.

    Attributes:
        native: The attention in C++.
        isa: Name of the instruction set in use.
        threads: Number of threads.
        layers: Number of layers.
        device: Device of all tensors.

    Raises:
        ValueError: If an argument is bad.
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
        cache = beside.native if isinstance(beside, CpuKvCache) else None
        self._beside = beside if cache else None
        # Prompts have packed values, those in K too.
        own = [replace(s, latent=False, indexer=None, compress_rate=0) for s in layers]
        shapes, forced = native_shapes(own, _attn_cpu.LayerShape), os.environ.get("HPCDECODE_ISA", "")
        self.native = _attn_cpu.Prefill(shapes, dtype, threads, list(cpus or ()), forced, cache)
        self.isa = self.native.isa
        self.threads = self.native.threads
        self.layers = len(layers)
        self._joined = {i: shape for i, shape in enumerate(layers) if shape.latent or shape.indexer}
        self.device = torch.device("cpu")

    def attends_beside(self, kv_cache: KvCache) -> bool:
        """Return whether `kv_cache` is the one whose threads are used."""
        return kv_cache is self._beside

    def tokens_in(self, nbytes: int) -> int:
        """Return the tokens of a prompt whose packed K and V, of all layers, take at most `nbytes`."""
        tokens = 1 << 12
        return nbytes * tokens // sum(self.packed_bytes(layer, tokens) for layer in range(self.layers))

    def packed_bytes(self, layer: int, tokens: int) -> int:
        """Return the bytes that hold the packed K and V of `tokens` tokens of one prompt at `layer`."""
        return self.native.packed_bytes(layer, tokens)

    def attend(
        self,
        layer: int,
        packed: Sequence[Tensor],
        starts: IntArray,
        counts: IntArray,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        out: Matrix,
        sinks: FloatArray | None = None,
        skipped_queries: IntArray | None = None,
        beside: LayerRows | None = None,
    ) -> LayerSeconds:
        """Pack k and v of the chunks, then attend, as `PromptAttention.attend`."""
        if shape := self._joined.get(layer):
            q, k = q[:, : shape.own_q_columns], k[:, : shape.own_k_columns]
            v = k[:, : shape.v_dim] if shape.latent else v
        spent = self.native.attend(layer, packed, starts, counts, q, k, v, out, sinks, skipped_queries, beside)
        return LayerSeconds(*spent)

    @property
    def thread_seconds(self) -> float:
        """Return the seconds spent in `attend` so far, times the number of threads."""
        return self.native.thread_seconds

    @property
    def busy_seconds(self) -> float:
        """Return the seconds of these in which threads had work."""
        return self.native.busy_seconds
