"""A KV cache as rotation of groups has it, all of whose pages lie in memory: what pages cost where nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdecode.attention.page_sizes import sizes_in_memory
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, attention_shapes
from hpcdecode.attention.sizes import block_tokens_for
from hpcdecode.attention.streamed import StreamedKvCache
from hpcdecode.system.swap_tiers import HostTier


def paged_cache(
    layers: Sequence[LayerShape | RecurrentShape],
    kv_dtype: str,
    tokens: int,
    slots: int,
    threads: int,
    cpus: Sequence[int] | None,
    team: bool,
) -> StreamedKvCache:
    """Open an empty KV cache of pages.

    Args:
        layers: Of a model whose layers all attend.
        kv_dtype: Data type of K and V.
        tokens: Of all sequences.
        slots: Sequences at once.
        threads: Number of threads.
        cpus: One CPU per thread, or None.
        team: True to run on torch's OpenMP threads.
    """
    shapes, block = attention_shapes(layers), block_tokens_for(layers, kv_dtype)
    sizes = sizes_in_memory(shapes, kv_dtype, block, tokens + block * slots)
    tier = HostTier(sizes.layers * sizes.ranges * sizes.chunk_bytes, sizes.chunk_bytes)  # takes memory as it is written
    return StreamedKvCache(shapes, kv_dtype, sizes, [tier], slots, block, threads, cpus, team)
