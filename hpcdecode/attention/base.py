"""Attention: the R-part's paged KV store, which attends where it lies, and the S-part's attention of prompts.

`open_kv_cache` picks the backend: `attn_cpu` (C++, all ISAs of the machine), `attn_cuda` (tensors are on a device, see
`attention_cuda`) or `reference` (plain torch, for tests).
Tensors are CPU torch tensors (float32, bfloat16) or numpy float32 arrays, 2-D, last dimension contiguous.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpcdecode import _attn_cpu
from hpcdecode.errors import UserError

BACKENDS = ("attn_cpu", "attn_cuda", "reference")
DEFAULT_BLOCK_TOKENS = 64
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")  # the last two with a scale per token and head


class KvCapacityError(RuntimeError):
    """The KV cache cannot hold what was asked for; nothing was changed."""


@dataclass(frozen=True)
class LayerShape:
    """One attention layer of the model. `scale` multiplies q.k; `window` counts positions, itself included."""

    kv_heads: int
    k_dim: int
    v_dim: int
    q_heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_columns(self) -> int:
        """Columns of a `[k | v]` row."""
        return self.kv_heads * (self.k_dim + self.v_dim)

    @property
    def q_columns(self) -> int:
        """Columns of a q row."""
        return self.q_heads * self.k_dim

    @property
    def row_columns(self) -> int:
        """Columns of a `[q | k | v]` row."""
        return self.q_columns + self.kv_columns

    @property
    def out_columns(self) -> int:
        """Columns of an output row."""
        return self.q_heads * self.v_dim


class KvCache(Protocol):
    """K and V of many sequences, and attention over them.

    A slot is a small int chosen by the caller, 0 <= slot < max_sequences, known from its first `extend` to its
    `release`. `slots` and `counts` are int32 arrays of one length; a slot appears once in a call; T = sum(counts).
    Bad arguments raise ValueError or TypeError before anything changes.
    """

    capacity_tokens: int  # multiple of block_tokens
    used_tokens: int  # in blocks that some slot holds
    free_blocks: int
    block_tokens: int
    bytes: int  # of the arena, whether touched yet or not
    bytes_read: int  # K and V bytes that attend calls have read
    attend_seconds: float  # time spent in attend calls

    def extend(self, slots: Any, counts: Any) -> None:
        """Make room for counts[i] more tokens in slots[i] and advance its length; unknown slots open with length 0.

        All or nothing: raises KvCapacityError before anything changes.
        """

    def append(self, layer: int, slots: Any, counts: Any, kv: Any) -> None:
        """Write K and V of the last counts[i] positions. kv [T, kv_columns]: rows [k | v], a slot's rows in order."""

    def attend(self, layer: int, slots: Any, counts: Any, qkv: Any, out: Any, sinks: Any = None) -> None:
        """Append, then attend causally from the last counts[i] positions over all positions of the slot.

        qkv [T, q_columns + kv_columns]: rows [q | k | v]. out [T, out_columns], same dtype, is overwritten.
        sinks [q_heads] float32: one more logit per head in the softmax denominator, without a value.
        """

    def release(self, slots: Any) -> None:
        """Forget sequences; a slot that is not open raises ValueError and nothing is released."""

    def fork(self, src: int, dst: int) -> None:
        """Open dst with what src holds. Blocks are shared; a partly filled one is copied when either side grows."""

    def truncate(self, slot: int, length: int) -> None:
        """Drop the positions from `length` on."""

    def length(self, slot: int) -> int:
        """Positions held by an open slot."""

    def check(self) -> None:
        """Prove that every block is free or referenced, and counted right; raises RuntimeError with what is broken."""


def capacity_for(layers: Sequence[LayerShape], kv_dtype: str, nbytes: int, block_tokens: int | None = None) -> int:
    """Tokens, in whole blocks, that fit in `nbytes`."""
    block, tokens = _attn_cpu.block_bytes(native_shapes(layers), kv_dtype, block_tokens)
    return nbytes // block * tokens


def bytes_per_token(layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int | None = None) -> float:
    """Stored bytes of one token over all layers, padding included."""
    block, tokens = _attn_cpu.block_bytes(native_shapes(layers), kv_dtype, block_tokens)
    return block / tokens


def block_tokens_for(layers: Sequence[LayerShape], kv_dtype: str) -> int:
    """Tokens of a block where `block_tokens` is None."""
    return _attn_cpu.block_bytes(native_shapes(layers), kv_dtype, None)[1]


def isa() -> str:
    """Name of the instruction set that `open_kv_cache` uses now. Raises UserError for a forced, unsupported one."""
    return _selected(os.environ.get("HPCDECODE_ISA", ""))


@functools.cache
def _selected(forced: str) -> str:
    try:
        return _attn_cpu.select_isa(forced)
    except ValueError as error:
        raise UserError(str(error)) from error


def multiplies_bfloat16() -> bool:
    """Whether that instruction set has products of bfloat16."""
    return isa() in ("avx512_bf16", "amx")


def native_shapes(layers: Sequence[LayerShape], module: Any = _attn_cpu) -> list[Any]:
    """`layers` as the native `module` has them."""
    return [
        module.LayerShape(s.kv_heads, s.k_dim, s.v_dim, s.q_heads, s.scale, s.window, s.softcap, s.sinks)
        for s in layers
    ]


class NativeKvCache:
    """The part of a KV store that its native engine does as it is: the engine's own methods and figures."""

    def __init__(self, engine: Any, layers: Sequence[LayerShape], kv_dtype: str) -> None:
        self._engine = engine
        self.layers = tuple(layers)
        self.kv_dtype = kv_dtype
        self.capacity_tokens: int = engine.capacity_tokens
        self.block_tokens: int = engine.block_tokens
        self.bytes: int = engine.bytes
        self.release = engine.release
        self.fork = engine.fork
        self.truncate = engine.truncate
        self.length = engine.length
        self.check = engine.check

    @property
    def used_tokens(self) -> int:
        return self._engine.used_tokens

    @property
    def free_blocks(self) -> int:
        return self._engine.free_blocks

    @property
    def bytes_read(self) -> int:
        return self._engine.bytes_read
