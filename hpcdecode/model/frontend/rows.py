"""GEMMs whose row counts take few values only.

oneDNN builds a kernel for every row count that it meets, which costs 1 to 20 ms and megabytes. The tokens of a step
vary, so a GEMM runs over `padded(tokens)` rows, and the rows beyond `tokens` are ignored. Tensors of `empty_rows` have
memory for those rows; others are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hpcdecode.model.frontend.meta import dense_strides


def padded(rows: int) -> int:
    """Return the row count of a GEMM over `rows` rows: at least as many, and one of few values.

    The values are powers of two up to 16, then multiples of 16, then eighths of a power of two.
    """
    if rows <= 16:
        return 1 << max(rows - 1, 0).bit_length()
    step = max(1 << (rows - 1).bit_length() >> 4, 16)
    return -(-rows // step) * step


def empty_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised [rows, columns] on the CPU, with memory for `padded(rows)` rows."""
    return torch.empty(padded(rows), columns, dtype=dtype)[:rows]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x` [..., in] @ weight.T + bias, for a `weight` [out, in] that oneDNN has packed."""
    return as_tokens(torch.ops.mkldnn._linear_pointwise(as_rows(x), weight, bias, "none", [], ""), x)


def as_rows(x: Tensor) -> Tensor:
    """Return `x` [..., in] as a GEMM takes it: [padded(rows), in]."""
    return with_padding(x.reshape(-1, x.shape[-1]))


def as_tokens(y: Tensor, x: Tensor) -> Tensor:
    """Return the result [padded(rows), out] of a GEMM over `x` [..., in] as [..., out], without a copy."""
    shape = (*x.shape[:-1], y.shape[1])
    return y.as_strided(shape, dense_strides(shape))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x` [rows, in] @ weight.T + bias."""
    return functional.linear(with_padding(x), weight, bias)[: len(x)]


def with_padding(x: Tensor) -> Tensor:
    """Return `x` [rows, columns] as [padded(rows), columns], without a copy if its memory goes on that far."""
    rows, columns = x.shape
    wanted = padded(rows)
    if wanted == rows:
        return x
    end = x.storage_offset() + (wanted - 1) * x.stride(0) + columns
    if x.stride(1) == 1 and end * x.element_size() <= x.untyped_storage().nbytes():
        return x.as_strided((wanted, columns), x.stride())
    return functional.pad(x, (0, 0, 0, wanted - rows))
