"""What the KV caches in C++ share: their own methods and figures, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from hpcdecode.attention.shapes import LayerShape

if TYPE_CHECKING:
    from hpcdecode import _attn_cpu, _attn_cuda

Native = TypeVar("Native", bound="_attn_cpu.KvCache | _attn_cuda.KvCache")


class NativeKvCache(Generic[Native]):
    """The part of `KvCache` that a native KV cache does without help.

    Attributes:
        native: The KV cache in C++.
        layers: Shapes of the attention layers.
        kv_dtype: Data type that K and V are stored as.
        capacity_tokens: Tokens of all blocks.
        block_tokens: Tokens of a block.
        bytes: Bytes of the arena, touched or not.
    """

    def __init__(self, native: Native, layers: Sequence[LayerShape], kv_dtype: str) -> None:
        self.native: Native = native
        self.layers = tuple(layers)
        self.kv_dtype = kv_dtype
        self.capacity_tokens = native.capacity_tokens
        self.block_tokens = native.block_tokens
        self.bytes = native.bytes
        self.release = native.release
        self.fork = native.fork
        self.truncate = native.truncate
        self.length = native.length
        self.check = native.check

    @property
    def used_tokens(self) -> int:
        """Return the tokens of the blocks that slots hold."""
        return self.native.used_tokens

    @property
    def free_blocks(self) -> int:
        """Return the number of free blocks."""
        return self.native.free_blocks

    @property
    def bytes_read(self) -> int:
        """Return the bytes of K and V that `attend` has read so far."""
        return self.native.bytes_read
