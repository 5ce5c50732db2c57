"""What a KV cache in torch holds of one layer: K, V, compressed entries and index keys, block after block.

A block has the entries, and the index keys of pools, that its tokens complete.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.attention.plain import index_dtype
from hpcdecode.attention.reference import DTYPES
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.torch_calls import CallSequences
from hpcdecode.attention.torch_rows import RowStore, k_spans, layer_bytes, open_rows, v_spans


class StoredLayer:
    """K, V and index keys of a layer, by place.

    Args:
        shape: Shape of the layer.
        kv_dtype: Data type of K and V.
        blocks: Number of blocks.
        block_tokens: Tokens of a block.
        device: Of the tensors.

    Attributes:
        shape: Shape of the layer.
        k: K of the tokens of a block, and behind it that of its entries.
        v: V, or None if the values are in K.
        index: Index keys, or None without an indexer.
        block_rows: Rows of K of a block.
        block_keys: Index keys of a block.
    """

    def __init__(self, shape: LayerShape, kv_dtype: str, blocks: int, block_tokens: int, device: torch.device) -> None:
        self.shape, self._block_tokens = shape, block_tokens
        heads, spans = shape.kv_heads, k_spans(shape, kv_dtype)
        self.block_rows = rows_of_block(shape, block_tokens)
        self.k = open_rows(blocks * self.block_rows, heads, shape.k_dim, spans, kv_dtype, device)
        self.v, self.index = None, None
        self._stores: list[tuple[RowStore, int]] = [(self.k, self.block_rows)]
        if not shape.latent:
            spans = v_spans(shape, kv_dtype)
            self.v = open_rows(blocks * block_tokens, heads, shape.v_dim, spans, kv_dtype, device)
            self._stores.append((self.v, block_tokens))
        self.block_keys = keys_of_block(shape, block_tokens)
        if self.block_keys and shape.indexer:
            name = index_dtype(kv_dtype)
            self.index = open_rows(blocks * self.block_keys, 1, shape.indexer.dim, [], name, device)
            self._stores.append((self.index, self.block_keys))

    @property
    def tensors(self) -> list[Tensor]:
        """Return all that is stored, each in the order of blocks."""
        return [tensor for store, _ in self._stores for tensor in store.tensors]

    @property
    def bytes(self) -> int:
        """Return the bytes of all blocks."""
        return sum(store.bytes for store, _ in self._stores)

    def copy(self, old: int, new: int) -> None:
        """Copy a block to another one."""
        for store, rows in self._stores:
            store.copy(slice(old * rows, (old + 1) * rows), slice(new * rows, (new + 1) * rows))

    def put(self, call: CallSequences, kv: Tensor) -> None:
        """Write rows [k | entry | index key | v] of a call's tokens, [tokens, kv_columns]."""
        shape = self.shape
        widths = [shape.own_k_columns, shape.entry_columns, shape.k_columns - shape.own_k_columns - shape.entry_columns]
        k, entry, key, v = kv.split([*widths, shape.v_columns], 1)
        self.k.put(call.written(self.block_rows), k.unflatten(1, (shape.kv_heads, -1)))
        if self.v is not None:
            self.v.put(call.written(self._block_tokens), v.unflatten(1, (shape.kv_heads, -1)))
        if shape.compress_rate:
            rows, places = call.completed(shape.compress_rate, self.block_rows, self._block_tokens)
            self.k.put(places, entry.index_select(0, rows).unflatten(1, (shape.kv_heads, -1)))
        if self.index is not None:
            rows, places = call.completed(shape.key_tokens, self.block_keys)
            self.index.put(places, key.index_select(0, rows).unsqueeze(1))


def keys_of_block(shape: LayerShape, block_tokens: int) -> int:
    """Return the index keys of a block; none of a layer that takes what another chose."""
    return units_of_block(shape.key_tokens, block_tokens) if shape.indexer and shape.indexer.heads else 0


def units_of_block(tokens: int, block_tokens: int) -> int:
    """Return how many units of so many tokens can end in a block; none of 0 tokens."""
    return -(-block_tokens // tokens) if tokens else 0


def rows_of_block(shape: LayerShape, block_tokens: int) -> int:
    """Return the rows of K of a block: those of its tokens and entries."""
    return block_tokens + units_of_block(shape.compress_rate, block_tokens)


def layer_block_bytes(shape: LayerShape, kv_dtype: str, block_tokens: int) -> int:
    """Return the bytes of a block of a layer."""
    keys = keys_of_block(shape, block_tokens)
    dim = shape.indexer.dim if shape.indexer else 0
    key_bytes = keys * dim * DTYPES[index_dtype(kv_dtype)].itemsize
    return rows_of_block(shape, block_tokens) * layer_bytes(shape, kv_dtype) + key_bytes
