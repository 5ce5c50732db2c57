"""RowStore of K or V in a tensor on any device: as numbers, or as codes of few bits with their scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpcdecode.attention.quantized import CODES, Codes, encoded, rotated, rotation_of
from hpcdecode.attention.reference import DTYPES, TILE
from hpcdecode.attention.shapes import LayerShape


class CodeSpan(NamedTuple):
    """Neighbouring elements of a head's row that have one scale.

    Attributes:
        width: Number of elements.
        codes: Their whole numbers.
        rotation: Elements that are rotated together.
    """

    width: int
    codes: Codes
    rotation: int


class RowStore(Protocol):
    """RowStore [heads, dim] of tokens, by place.

    Attributes:
        tensors: All that is stored, each [tokens, ...].
    """

    tensors: list[Tensor]

    @property
    def bytes(self) -> int:
        """Return the bytes of all rows."""

    def put(self, places: Tensor, rows: Tensor) -> None:
        """Write rows [T, heads, dim] to places, int64 [T]."""

    def read(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [T, heads, dim] of places, int32 or int64 [T]; rotated if they are codes."""

    def copy(self, old: slice, new: slice) -> None:
        """Copy the rows of a block to another one."""

    def by_head(self) -> RowStore:
        """Return the same rows with one head each: that of head h of a place lies at place * heads + h."""


class NumberRows:
    """`RowStore` of numbers as they are."""

    def __init__(self, rows: Tensor, heads: int) -> None:
        self._rows, self._heads = rows, heads
        self.tensors = [rows]
        self.bytes = rows.nbytes

    def put(self, places: Tensor, rows: Tensor) -> None:
        """Write rows, as `RowStore.put`."""
        self._rows.index_copy_(0, places, rows.flatten(1).to(self._rows.dtype))

    def read(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows, as `RowStore.read`."""
        rows: Tensor = self._rows.index_select(0, places).to(dtype).unflatten(1, (self._heads, -1))
        return rows

    def copy(self, old: slice, new: slice) -> None:
        """Copy rows, as `RowStore.copy`."""
        self._rows[new] = self._rows[old]

    def by_head(self) -> NumberRows:
        """Return the rows of heads, as `RowStore.by_head`."""
        return NumberRows(self._rows.view(len(self._rows) * self._heads, -1), 1)


class CodeRows:
    """`RowStore` of whole numbers of 8 bits, or of 4 bits two to a byte; tensors are [tokens, heads, ...]."""

    def __init__(self, spans: Sequence[CodeSpan], codes: Tensor, scales: Tensor, middles: Tensor | None) -> None:
        self._spans = tuple(spans)
        self._dim, self._widths = sum(s.width for s in spans), [s.width for s in spans]
        self._nibbles = code_bits(spans) == 4
        self._codes, self._scales, self._middles = codes, scales, middles
        self.tensors = [t for t in (codes, scales, middles) if t is not None]
        self.bytes = sum(t.nbytes for t in self.tensors)

    @classmethod
    def open(cls, tokens: int, heads: int, spans: Sequence[CodeSpan], device: torch.device) -> CodeRows:
        """Return rows that hold nothing yet."""
        dim = sum(s.width for s in spans)
        columns = -(-dim // 2) if code_bits(spans) == 4 else dim
        codes = torch.empty(tokens, heads, columns, dtype=torch.int8, device=device)
        scales = torch.empty(tokens, heads, len(spans), dtype=torch.bfloat16, device=device)
        return cls(spans, codes, scales, torch.empty_like(scales) if _has_middles(spans) else None)

    def put(self, places: Tensor, rows: Tensor) -> None:
        """Write rows, as `RowStore.put`."""
        parts = [
            encoded(rotated(part, s.rotation), s.codes)
            for part, s in zip(rows.float().split(self._widths, -1), self._spans, strict=True)
        ]
        code = torch.cat([part.code for part in parts], -1).to(torch.int8)
        self._codes.index_copy_(0, places, _packed(code) if self._nibbles else code)
        self._scales.index_copy_(0, places, torch.cat([part.scale for part in parts], -1).bfloat16())
        if self._middles is not None:
            self._middles.index_copy_(0, places, torch.cat([part.middle for part in parts], -1).bfloat16())

    def read(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rotated rows, as `RowStore.read`."""
        codes = self._codes.index_select(0, places)
        values = (_unpacked(codes, self._dim) if self._nibbles else codes).to(dtype)
        parts = values.split(self._widths, -1)
        scales = self._scales.index_select(0, places).to(dtype).split(1, -1)
        if self._middles is not None:
            middles = self._middles.index_select(0, places).to(dtype).split(1, -1)
            parts = [torch.addcmul(m, part, s) for part, s, m in zip(parts, scales, middles, strict=True)]
        else:
            parts = [part * s for part, s in zip(parts, scales, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def copy(self, old: slice, new: slice) -> None:
        """Copy rows, as `RowStore.copy`."""
        for tensor in self.tensors:
            tensor[new] = tensor[old]

    def by_head(self) -> CodeRows:
        """Return the rows of heads, as `RowStore.by_head`."""
        codes, scales, *middles = (tensor.flatten(0, 1).unsqueeze(1) for tensor in self.tensors)
        return CodeRows(self._spans, codes, scales, middles[0] if middles else None)


def k_spans(shape: LayerShape, kv_dtype: str) -> list[CodeSpan]:
    """Return how K of a head is coded, and the values in it if the layer is latent; nothing if it is numbers."""
    if kv_dtype not in CODES:
        return []
    codes, dim = CODES[kv_dtype][0], shape.k_dim
    if not shape.latent:
        return [CodeSpan(dim, codes, rotation_of(dim))]
    if shape.v_dim % TILE or shape.v_dim == dim:
        return [CodeSpan(dim, codes, rotation_of(math.gcd(dim, shape.v_dim)))]
    return [CodeSpan(width, codes, rotation_of(width)) for width in (shape.v_dim, dim - shape.v_dim)]


def v_spans(shape: LayerShape, kv_dtype: str) -> list[CodeSpan]:
    """Return how V of a head is coded, or rotated if it is in K; nothing if it is numbers."""
    if kv_dtype not in CODES:
        return []
    rotation = k_spans(shape, kv_dtype)[0].rotation if shape.latent else rotation_of(shape.v_dim)
    return [CodeSpan(shape.v_dim, CODES[kv_dtype][1], rotation)]


def turned(x: Tensor, spans: Sequence[CodeSpan]) -> Tensor:
    """Return x [..., dim] rotated as rows of these spans are, divided by its size; the same if there are none.

    Its product with rotated rows is that of x with the rows, and applied to sums of rotated rows it rotates them back.
    """
    if not spans:
        return x
    parts = x.split([s.width for s in spans], -1)
    return torch.cat([rotated(p, s.rotation) / s.rotation for p, s in zip(parts, spans, strict=True)], -1)


def open_rows(
    tokens: int, heads: int, dim: int, spans: Sequence[CodeSpan], kv_dtype: str, device: torch.device
) -> RowStore:
    """Open rows of so many tokens: of codes if there are spans, else of numbers."""
    if spans:
        return CodeRows.open(tokens, heads, spans, device)
    return NumberRows(torch.empty(tokens, heads * dim, dtype=DTYPES[kv_dtype], device=device), heads)


def layer_bytes(shape: LayerShape, kv_dtype: str) -> int:
    """Return the bytes of K and V of a token of a layer, or of K of an entry."""
    nbytes = _head_bytes(shape.k_dim, k_spans(shape, kv_dtype), kv_dtype)
    if not shape.latent:
        nbytes += _head_bytes(shape.v_dim, v_spans(shape, kv_dtype), kv_dtype)
    return shape.kv_heads * nbytes


def code_bits(spans: Sequence[CodeSpan]) -> int:
    """Return the bits that a code takes: 4, or 8 for those of more than 4."""
    return 4 if all(s.codes.high - s.codes.low < 16 for s in spans) else 8


def _head_bytes(dim: int, spans: Sequence[CodeSpan], kv_dtype: str) -> int:
    if not spans:
        return dim * DTYPES[kv_dtype].itemsize
    scales = len(spans) * (2 if _has_middles(spans) else 1)
    return -(-dim * code_bits(spans) // 8) + scales * torch.bfloat16.itemsize


def _has_middles(spans: Sequence[CodeSpan]) -> bool:
    return any(s.codes.middle for s in spans)


def _packed(code: Tensor) -> Tensor:
    """Return codes from -8 to 7 two to a byte, the even ones in its low half."""
    if code.shape[-1] % 2:
        code = torch.nn.functional.pad(code, (0, 1))
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = (low & 15) | (high << 4)
    return packed


def _unpacked(code: Tensor, dim: int) -> Tensor:
    """Return the codes of `_packed`."""
    return torch.stack(((code << 4) >> 4, code >> 4), -1).flatten(-2)[..., :dim]
