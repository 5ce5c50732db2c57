"""What every backend of attention shares: the protocols of KV caches and of prompt attention.

Backends are `attn_cpu` (C++, for every instruction set of the machine), `attn_cuda` (tensors on a GPU, see `cuda`),
`torch` (the same by torch's operations, for what `attn_cuda` does not take, see `torch_cache`) and `reference` (plain
torch, for tests). `open_kv_cache` in `open` picks one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

from hpcdecode import _attn_cpu
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, MixerShape
from hpcdecode.errors import UserError

if TYPE_CHECKING:
    import torch
    from numpy import float32, int32
    from numpy.typing import NDArray
    from torch import Tensor

BACKENDS = ("attn_cpu", "attn_cuda", "torch", "reference")
DEFAULT_BLOCK_TOKENS = 64
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "k8v4", "int4")  # the last three: `quantized`
LATENT_KV_DTYPES = KV_DTYPES[:4]  # K and V are kept alike

IntArray: TypeAlias = "list[int] | tuple[int, ...] | NDArray[int32] | Tensor"  # int32, one dimension, on the host
FloatArray: TypeAlias = "NDArray[float32] | Tensor"  # float32, one dimension, on the host
Matrix: TypeAlias = "NDArray[float32] | Tensor"  # float32 or bfloat16, two dimensions, rows of contiguous elements
_Shape = TypeVar("_Shape")


class KvCapacityError(RuntimeError):
    """The KV cache cannot hold what was asked for; nothing was changed."""


class KvCache(Protocol):
    """K and V of many sequences, and attention over them.

    The caller chooses a slot for each sequence, 0 <= slot < max_sequences. A slot is open from its first `extend` to
    its `release`. In every call `slots` and `counts` have one length, a slot appears once, and T = sum(counts).
    Bad arguments raise ValueError or TypeError before anything changes.
    """

    @property
    def layers(self) -> Sequence[MixerShape]:
        """Return the shapes of the layers."""

    @property
    def capacity_tokens(self) -> int:
        """Return the tokens of all blocks."""

    @property
    def used_tokens(self) -> int:
        """Return the tokens of the blocks that slots hold."""

    @property
    def free_blocks(self) -> int:
        """Return the number of free blocks."""

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a block."""

    @property
    def bytes(self) -> int:
        """Return the bytes of the arena, touched or not."""

    @property
    def bytes_read(self) -> int:
        """Return the bytes of K and V that `attend` has read so far."""

    @property
    def attend_seconds(self) -> float:
        """Return the seconds spent in `attend` so far."""

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for counts[i] more tokens in slots[i] and advance its length; a new slot opens with length 0.

        Args:
            slots: int32 [n].
            counts: int32 [n].

        Raises:
            KvCapacityError: If there are too few free blocks; nothing changes.
        """

    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Write K and V of the last counts[i] positions of slots[i].

        Args:
            layer: Index of the attention layer.
            slots: int32 [n].
            counts: int32 [n].
            kv: Rows [k | v], [T, kv_columns], those of a slot in order.
        """

    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Append, then attend causally from the last counts[i] positions over all positions of slots[i].

        Args:
            layer: Index of the attention layer.
            slots: int32 [n].
            counts: int32 [n].
            qkv: Rows [q | k | v], [T, q_columns + kv_columns].
            out: Result, [T, out_columns], of the dtype of qkv; overwritten.
            sinks: float32 [q_heads], one more logit per head in the softmax's denominator; None for a layer without.
        """

    def release(self, slots: IntArray) -> None:
        """Forget sequences.

        Raises:
            ValueError: If a slot is not open; nothing is released.
        """

    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with what src holds. Blocks are shared; a partly filled one is copied before it is written."""

    def truncate(self, slot: int, length: int) -> None:
        """Drop the positions of a slot from `length` on."""

    def length(self, slot: int) -> int:
        """Return the number of positions that an open slot holds."""

    def check(self) -> None:
        """Check that every block is free or referenced, and counted right.

        Raises:
            RuntimeError: With the equation that does not hold.
        """


class LayerRows(NamedTuple):
    """What a layer brings to a KV cache on CPUs, for its threads to do beside prompts. A slot is in one of the lists.

    Attributes:
        kv_cache: The KV cache in C++.
        layer: Index of its attention layer.
        prompt_slots: int32 [p], as `KvCache.append` takes them.
        prompt_counts: int32 [p].
        kv: Rows [k | v] of prompts, [sum(prompt_counts), kv_columns].
        slots: int32 [n], as `KvCache.attend` takes them.
        counts: int32 [n].
        qkv: Rows [q | k | v], [sum(counts), row_columns].
        out: Result, [sum(counts), out_columns]; overwritten.
        sinks: float32 [q_heads], or None for a layer without.
    """

    kv_cache: _attn_cpu.KvCache
    layer: int
    prompt_slots: IntArray
    prompt_counts: IntArray
    kv: Matrix
    slots: IntArray
    counts: IntArray
    qkv: Matrix
    out: Matrix
    sinks: FloatArray | None


class LayerSeconds(NamedTuple):
    """The seconds of a call, dealt out by what its threads spent: attend and append of a KV cache, and prompts."""

    attend: float
    append: float
    prompts: float


class PromptAttention(Protocol):
    """Causal attention of prompts over their own K and V, which the caller holds packed."""

    @property
    def device(self) -> torch.device:
        """Return the device of all tensors."""

    def attends_beside(self, kv_cache: KvCache) -> bool:
        """Return whether `attend` takes rows of `kv_cache`, whose threads it runs on."""

    def tokens_in(self, nbytes: int) -> int:
        """Return the tokens of a prompt whose packed K and V, of all layers, take at most `nbytes`."""

    def packed_bytes(self, layer: int, tokens: int) -> int:
        """Return the bytes that hold the packed K and V of `tokens` tokens of one prompt at `layer`."""

    def attend(
        self,
        layer: int,
        packed: list[Tensor],
        starts: list[int],
        counts: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        skipped_queries: list[int] | None = None,
        beside: LayerRows | None = None,
    ) -> LayerSeconds | None:
        """Pack k and v of the chunks, then attend from tokens starts[i], starts[i] + 1, ... of prompt i.

        Args:
            layer: Index of the attention layer.
            packed: For every chunk uint8 memory of its prompt, at least packed_bytes(layer, starts[i] + counts[i])
                long, with the tokens before starts[i].
            starts: Position of every chunk's first token in its prompt.
            counts: Tokens of every chunk.
            q: Queries of the chunks' tokens in order, [T, q_heads * k_dim] with T = sum(counts).
            k: Keys, [T, kv_heads * k_dim].
            v: Values, [T, kv_heads * v_dim].
            out: Result, [T, q_heads * v_dim].
            sinks: float32 [q_heads], as in `KvCache.attend`.
            skipped_queries: How many of a chunk's first tokens need no result; their rows of out stay as they are.
            beside: Rows for a KV cache of which `attends_beside` is true, to be done at the same time.

        Returns:
            What took how long, if it is known.
        """


def isa() -> str:
    """Return the name of the instruction set that kernels use now.

    Raises:
        UserError: If HPCDECODE_ISA names one that is unknown or unsupported here.
    """
    return _selected(os.environ.get("HPCDECODE_ISA", ""))


@functools.cache
def _selected(forced: str) -> str:
    try:
        return _attn_cpu.select_isa(forced)
    except ValueError as error:
        raise UserError(str(error)) from error


def multiplies_bfloat16() -> bool:
    """Return True if the instruction set in use has products of bfloat16."""
    return isa() in ("avx512_bf16", "amx")


def native_shapes(layers: Sequence[LayerShape], shape: Callable[..., _Shape]) -> list[_Shape]:
    """Return `layers` as objects of a native module, whose class LayerShape is `shape`."""
    made = []
    for s in layers:
        chosen = (s.indexer.heads, s.indexer.dim, s.indexer.topk) if s.indexer else ()
        heads = s.kv_heads, s.k_dim, s.v_dim, s.q_heads
        pool, local = (s.indexer.pool, s.indexer.local) if s.indexer else (1, 0)
        more: dict[str, object] = {"chunked": s.chunked, "compress_rate": s.compress_rate}
        more |= {"index_pool": pool, "index_local": local}
        if s.bias is not None:
            more |= {"bias_dim": s.bias.dim, "bias_profiles": s.bias.values().ravel() if s.bias.extent else None}
        if s.row_sinks:
            more["row_sinks"] = True
        made.append(shape(*heads, s.scale, s.window, s.softcap, s.sinks, s.latent, *chosen, **more))
    return made


def native_states(layers: Sequence[RecurrentShape], shape: Callable[..., _Shape]) -> list[_Shape]:
    """Return `layers` as objects of a native module, whose class RecurrentShape is `shape`."""
    return [
        shape(
            s.heads,
            s.k_heads,
            s.k_dim,
            s.v_dim,
            s.taps,
            s.silu,
            s.delta,
            s.normalised,
            s.scale,
            s.decay_dim,
            s.has_beta,
            s.has_rate,
            s.compress_rate,
            s.overlaps,
        )
        for s in layers
    ]
