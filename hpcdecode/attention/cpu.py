"""The KV cache on this machine's cores: `native/attn_cpu` in C++."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import FloatArray, IntArray, KvCapacityError, LayerRows, Matrix, native_shapes
from hpcdecode.attention.native import NativeKvCache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.system.cores import nodes_of


def native_cache(
    layers: Sequence[LayerShape],
    kv_dtype: str,
    capacity_tokens: int,
    max_sequences: int,
    block_tokens: int | None,
    threads: int,
    cpus: list[int],
    nodes: list[int],
    team: bool,
    range_blocks: int = 0,
    frames: int = 0,
    windowed: bool = False,
    lookahead: int = 0,
) -> _attn_cpu.KvCache:
    """Return the KV cache in C++, by its arguments.

    Raises:
        UserError: If the system maps no more memory.
    """
    shapes, isa = native_shapes(layers, _attn_cpu.LayerShape), os.environ.get("HPCDECODE_ISA", "")
    sizes = (
        capacity_tokens,
        max_sequences,
        block_tokens,
        threads,
        cpus,
        isa,
        nodes,
        team,
        range_blocks,
        frames,
        windowed,
        lookahead,
    )
    try:
        return _attn_cpu.KvCache(shapes, kv_dtype, *sizes)
    except RuntimeError as error:  # the system maps no more memory
        raise UserError(f"{error}: lower --kv-memory, or give the process more memory") from error


class CpuKvCache(NativeKvCache["_attn_cpu.KvCache"]):
    """A `KvCache` on CPUs. Tensors are CPU torch tensors (float32, bfloat16) or numpy float32 arrays.

    Args:
        layers: Shapes of the attention layers.
        kv_dtype: One of KV_DTYPES.
        capacity_tokens: Tokens to hold, rounded up to whole blocks.
        max_sequences: Slots are 0 to max_sequences - 1.
        block_tokens: Tokens of a block, or None for the default.
        threads: Number of threads, the calling one included.
        cpus: One CPU per thread to pin workers to, or None.
        nodes: NUMA node of each of `cpus`, or None to ask the system.
        team: True to run on torch's OpenMP threads.
        windowed: Whether sequences give up the blocks that left a layer's window. A slot then attends from one position
            at a time, and cannot be truncated to where they are missed.
        lookahead: Tokens by which a slot may be truncated all the same, so that it may attend from one position more.

    Attributes:
        isa: Name of the instruction set in use.
        threads: Number of threads.

    Raises:
        ValueError: If an argument is bad.
        UserError: If the system maps no more memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        capacity_tokens: int,
        max_sequences: int,
        block_tokens: int | None,
        threads: int,
        cpus: Sequence[int] | None,
        nodes: Sequence[int] | None,
        team: bool,
        windowed: bool = False,
        lookahead: int = 0,
    ) -> None:
        cpus = list(cpus or ())
        nodes = nodes_of(cpus) if nodes is None else list(nodes)
        native = native_cache(
            layers,
            kv_dtype,
            capacity_tokens,
            max_sequences,
            block_tokens,
            threads,
            cpus,
            nodes,
            team,
            windowed=windowed,
            lookahead=lookahead,
        )
        super().__init__(native, layers, kv_dtype)
        self.isa = native.isa
        self.threads = native.threads
        self.append = native.append
        self.attend = native.attend
        self.read_seconds = native.read_seconds

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens, as `KvCache.extend`."""
        try:
            self.native.extend(slots, counts)
        except _attn_cpu.CapacityError as error:
            raise KvCapacityError(str(error)) from None

    def step_attention(
        self, slots: IntArray, counts: IntArray, dtype: str, sinks: Sequence[Tensor | None]
    ) -> _attn_cpu.StepAttention:
        """Return the attention of new tokens of each of `slots`, for a native chain to call.

        Args:
            slots: int32 [n], in the order of the rows.
            counts: int32 [n], by how many tokens each was extended; 1 where layers choose tokens.
            dtype: float32 or bfloat16, of the rows.
            sinks: For every layer float32 [q_heads], or None.
        """
        return _attn_cpu.StepAttention(self.native, slots, counts, dtype, sinks)

    def layer_rows(
        self,
        layer: int,
        prompts: tuple[IntArray, IntArray, Matrix],
        decodes: tuple[IntArray, IntArray, Matrix, Matrix],
        sinks: FloatArray | None,
    ) -> LayerRows:
        """Return rows of a layer, to be appended and attended from beside prompts.

        Args:
            layer: Index of the attention layer.
            prompts: Slots, counts and kv, as `append` takes them.
            decodes: Slots, counts, qkv and out, as `attend` takes them.
            sinks: float32 [q_heads], or None for a layer without.
        """
        (prompt_slots, prompt_counts, kv), (slots, counts, qkv, out) = prompts, decodes
        return LayerRows(self.native, layer, prompt_slots, prompt_counts, kv, slots, counts, qkv, out, sinks)

    @property
    def node_free_blocks(self) -> list[int]:
        """Return the number of free blocks of each NUMA node, in the order of the nodes' numbers."""
        return self.native.node_free_blocks

    @property
    def attend_seconds(self) -> float:
        """Return the seconds spent in `attend` so far."""
        return self.native.attend_seconds

    @property
    def thread_seconds(self) -> float:
        """Return the seconds spent in `append` and `attend` alone so far, times the number of threads."""
        return self.native.thread_seconds

    @property
    def busy_seconds(self) -> float:
        """Return the seconds of these in which threads had work."""
        return self.native.busy_seconds
