"""The KV cache and attention in plain torch, which tests compare the fast backends with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from hpcdecode.attention.base import DEFAULT_BLOCK_TOKENS, FloatArray, IntArray, Matrix
from hpcdecode.attention.block_table import BlockTable
from hpcdecode.attention.plain import attend_rows, chosen_positions, index_dtype
from hpcdecode.attention.quantized import CODES, restored, rotation_of
from hpcdecode.attention.shapes import LayerShape

DTYPES = {  # of the tensors that hold K and V; integer types are kept as the floats they stand for
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    **dict.fromkeys(CODES, torch.float32),
}


TILE = 16  # elements: in whole numbers, values in K that end with a tile have a scale of their own


def stored(k: torch.Tensor, v: torch.Tensor, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v, [tokens, heads, dim], as a KV cache of `kv_dtype` gives them back."""
    if kv_dtype in CODES:
        of_k, of_v = CODES[kv_dtype]
        return restored(k, of_k), restored(v, of_v)
    return k.to(DTYPES[kv_dtype]), v.to(DTYPES[kv_dtype])


def stored_latents(k: torch.Tensor, v_dim: int, kv_dtype: str) -> torch.Tensor:
    """Return k, [tokens, dim], whose first v_dim elements are the values, as a KV cache gives it back."""
    if kv_dtype not in CODES:
        return k.to(DTYPES[kv_dtype])
    codes, dim = CODES[kv_dtype][0], k.shape[-1]
    if v_dim % TILE or v_dim == dim:
        return restored(k, codes, rotation_of(math.gcd(dim, v_dim)))
    return torch.cat([restored(part, codes) for part in k.split([v_dim, dim - v_dim], -1)], -1)


def stored_rows(kv: torch.Tensor, shape: LayerShape, kv_dtype: str) -> torch.Tensor:
    """Return rows [key | entry | index key | value], float32 [tokens, kv_columns], as a KV cache gives them back."""
    dim = shape.indexer.dim if shape.indexer else 0
    own, entry, keys, v = kv.split([shape.own_k_columns, shape.entry_columns, dim, shape.v_columns], 1)
    if shape.latent:
        parts = [stored_latents(x, shape.v_dim, kv_dtype) for x in (own, entry) if x.shape[1]]
    else:
        heads = (shape.kv_heads, -1)
        k, values = stored(own.unflatten(1, heads), v.unflatten(1, heads), kv_dtype)
        parts, v = [k.flatten(1)], values.flatten(1)
    return torch.cat([x.float() for x in (*parts, keys.to(DTYPES[index_dtype(kv_dtype)]), v)], 1)


class ReferenceKvCache:
    """A `KvCache` in torch: one tensor per layer, K and V of a block side by side; attention in float32."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        capacity_tokens: int,
        max_sequences: int,
        block_tokens: int | None,
    ) -> None:
        if kv_dtype not in DTYPES:
            raise ValueError(f"kv_dtype: expected one of {', '.join(DTYPES)}, got {kv_dtype!r}")
        self.layers = tuple(layers)
        self.kv_dtype = kv_dtype
        self.table = table = BlockTable(block_tokens or DEFAULT_BLOCK_TOKENS, capacity_tokens, max_sequences)
        self.block_tokens, self.capacity_tokens = table.block_tokens, table.capacity_tokens
        self.release, self.fork, self.truncate = table.release, table.fork, table.truncate
        self.length, self.check = table.length, table.check
        size = (table.blocks, table.block_tokens)
        self._kv = [torch.empty(*size, s.kv_columns, dtype=DTYPES[kv_dtype]) for s in layers]
        self._chosen: dict[int, torch.Tensor] = {}  # by slot, for its last new tokens: [count, L] of booleans
        self.bytes_read = 0
        self.attend_seconds = 0.0

    @property
    def free_blocks(self) -> int:
        """Return the number of free blocks."""
        return self.table.free_blocks

    @property
    def used_tokens(self) -> int:
        """Return the tokens of the blocks that slots hold."""
        return self.table.used_tokens

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensors that hold K and V."""
        return sum(kv.numel() * kv.element_size() for kv in self._kv)

    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens, as `KvCache.extend`."""
        for old, new in self.table.extend(slots, counts):
            for kv in self._kv:
                kv[new] = kv[old]

    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Write K and V, as `KvCache.append`."""
        self._check_layer(layer)
        kv = torch.as_tensor(kv)
        pairs = self._pairs(slots, counts)
        self._check_shape("kv", kv, sum(c for _, c in pairs), self.layers[layer].kv_columns)
        start = 0
        for slot, count in pairs:
            where = self._positions(slot)[self.length(slot) - count :]
            flat = self._kv[layer].view(-1, kv.shape[1])
            flat[where] = self._stored(layer, kv[start : start + count])
            start += count

    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Append and attend, as `KvCache.attend`."""
        begun = time.perf_counter()
        self._check_layer(layer)
        s = self.layers[layer]
        qkv, result = torch.as_tensor(qkv), torch.as_tensor(out)
        pairs = self._pairs(slots, counts)
        tokens = sum(c for _, c in pairs)
        self._check_shape("qkv", qkv, tokens, s.q_columns + s.kv_columns)
        self._check_shape("out", result, tokens, s.out_columns)
        if s.sinks != (sinks is not None):
            raise ValueError(f"sinks: expected {'[q_heads] float32' if s.sinks else 'None'} for layer {layer}")
        self.append(layer, slots, counts, qkv[:, s.q_columns :])
        start = 0
        for slot, count in pairs:
            rows = slice(start, start + count)
            kv = self._kv[layer].view(-1, s.kv_columns)[self._positions(slot)].float()
            q = qkv[rows, : s.own_q_columns].float().view(count, s.q_heads, s.k_dim)
            sink = None if sinks is None else torch.as_tensor(sinks)
            by = qkv[rows, s.own_q_columns : s.q_columns].float()
            chosen = None
            if s.indexer and not s.compress_rate:
                if s.indexer.heads:
                    self._chosen[slot] = chosen_positions(by, kv[:, s.own_k_columns : s.k_columns], s.indexer)
                chosen = self._chosen[slot]
            o = attend_rows(q, kv, by, s, sink, chosen)
            result[rows] = o.reshape(count, -1).to(result.dtype)
            self.bytes_read += kv.numel() * self._kv[layer].element_size()
            start += count
        self.attend_seconds += time.perf_counter() - begun

    def _stored(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        return stored_rows(kv, self.layers[layer], self.kv_dtype).to(self._kv[layer].dtype)

    def _positions(self, slot: int) -> torch.Tensor:
        """Return the index of every position of a slot in a layer's tensor of rows."""
        blocks = torch.from_numpy(self.table.held(np.array([slot], np.int32))[0]).long()
        rows = blocks[:, None] * self.block_tokens + torch.arange(self.block_tokens)
        return rows.flatten()[: self.length(slot)]

    def _pairs(self, slots: IntArray, counts: IntArray) -> list[tuple[int, int]]:
        own, new = self.table.written(slots, counts)
        return list(zip(own.tolist(), new.tolist(), strict=True))

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer {layer} is out of range: expected 0 to {len(self.layers) - 1}")

    @staticmethod
    def _check_shape(name: str, x: torch.Tensor, rows: int, columns: int) -> None:
        if tuple(x.shape) != (rows, columns):
            raise ValueError(f"{name}: expected shape [{rows}, {columns}], got {list(x.shape)}")
