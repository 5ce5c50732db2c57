"""Matrix products over a few numbers of rows only.

oneDNN makes a kernel for every number of rows that it meets, which takes 1 to 20 ms and megabytes. The tokens of a step
vary, so products run over `padded(tokens)` rows; what the rows beyond hold is never looked at. Tensors of `empty_rows`
have memory for them, others are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hpcdecode.model.frontend.meta import dense_strides


def padded(rows: int) -> int:
    """The next of 1, 2, 4, 8, 16, then of multiples of 16, then of eighths of a power of two."""
    if rows <= 16:
        return 1 << max(rows - 1, 0).bit_length()
    step = max(1 << (rows - 1).bit_length() >> 4, 16)
    return -(-rows // step) * step


def empty_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialized [rows, columns], on the CPU."""
    return torch.empty(padded(rows), columns, dtype=dtype)[:rows]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ weight.T + bias, for a `weight` [out, in] that oneDNN has packed."""
    return as_tokens(torch.ops.mkldnn._linear_pointwise(as_rows(x), weight, bias, "none", [], ""), x)


def as_rows(x: Tensor) -> Tensor:
    """x [..., in] as a product takes it: [padded(rows), in]."""
    return with_room(x.reshape(-1, x.shape[-1]))


def as_tokens(y: Tensor, x: Tensor) -> Tensor:
    """A product's [padded(rows), out] as [..., out], for the x [..., in] that went in."""
    shape = (*x.shape[:-1], y.shape[1])
    return y.as_strided(shape, dense_strides(shape))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight.T + bias."""
    return functional.linear(with_room(x), weight, bias)[: len(x)]


def with_room(x: Tensor) -> Tensor:
    """x [rows, columns] with `padded(rows)` rows, in place where its memory goes on."""
    rows, columns = x.shape
    room = padded(rows)
    if room == rows:
        return x
    end = x.storage_offset() + (room - 1) * x.stride(0) + columns
    if x.stride(1) == 1 and end * x.element_size() <= x.untyped_storage().nbytes():
        return x.as_strided((room, columns), x.stride())
    return functional.pad(x, (0, 0, 0, room - rows))
