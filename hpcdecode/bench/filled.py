"""A KV cache whose K and V are known: what benchmarks read, and how they check the answers."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import KvCache
from hpcdecode.attention.plain import attend_rows
from hpcdecode.attention.reference import stored_rows
from hpcdecode.attention.shapes import LayerShape

LENGTHS = (1, 100, 1500)  # of the sequences that are checked
_ROWS = 1024  # random ones, repeated
_TOLERANCE = 2e-2  # share of max |v|; bfloat16 activations


def capacity(lengths: tuple[int, ...]) -> int:
    """Return the tokens that a KV cache needs for sequences of these lengths, with blocks of up to 64 tokens."""
    return sum(-(-n // 64) * 64 for n in lengths)


def fill(
    kv_cache: KvCache,
    shape: LayerShape,
    lengths: tuple[int, ...],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Put sequences of `lengths` tokens into slots 0, 1, ... of an empty KV cache.

    Returns:
        The rows [k | v] that they repeat, `dtype` [1024, kv_columns].
    """
    rows = torch.randn(_ROWS, shape.kv_columns, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    for slot, length in enumerate(lengths):
        for start, end in pairwise([*range(0, length, _ROWS), length]):
            slots, counts = np.array([slot], np.int32), np.array([end - start], np.int32)
            kv_cache.extend(slots, counts)
            kv_cache.append(0, slots, counts, rows[: end - start])
    return rows


class DecodeArguments(NamedTuple):
    """What `KvCache.attend` takes beside the layer, for one token of each sequence."""

    slots: NDArray[np.int32]
    counts: NDArray[np.int32]
    qkv: Tensor
    out: Tensor


def decode(
    shape: LayerShape, n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> DecodeArguments:
    """Return random arguments for one token of each of the sequences in slots 0 to n - 1."""
    qkv = torch.randn(n, shape.row_columns, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    out = torch.empty(n, shape.out_columns, dtype=dtype, device=device)
    return DecodeArguments(np.arange(n, dtype=np.int32), np.ones(n, np.int32), qkv, out)


def verify(kv_cache: KvCache, shape: LayerShape, kv_dtype: str, device: torch.device | str = "cpu") -> None:
    """Fill an empty KV cache with sequences of LENGTHS, and compare its attention with float64.

    Raises:
        RuntimeError: If they differ.
    """
    errors = errors_of(kv_cache, shape, kv_dtype, device)
    for length, error in zip(LENGTHS, errors, strict=True):
        if not error <= _TOLERANCE:
            raise RuntimeError(f"{kv_dtype}, {shape}, length {length}: error {error:.3g} of max |v| is out of bounds")


def errors_of(
    kv_cache: KvCache,
    shape: LayerShape,
    kv_dtype: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> list[float]:
    """Fill an empty KV cache with sequences of LENGTHS, and return its attention's largest errors as shares of max |v|.

    Args:
        kv_cache: The KV cache, of one layer.
        shape: Its layer.
        kv_dtype: Its data type.
        device: Where it takes tensors.
        dtype: Data type of activations.
    """
    rows = fill(kv_cache, shape, LENGTHS, device, dtype).cpu()
    slots, counts, qkv, out = decode(shape, len(LENGTHS), device, dtype)
    kv_cache.attend(0, slots, counts, qkv, out)
    return [
        _error(qkv[i : i + 1].cpu(), out[i].cpu(), rows.repeat(2, 1)[: length - 1], shape, kv_dtype)
        for i, length in enumerate(LENGTHS)
    ]


def _error(own: Tensor, out: Tensor, before: Tensor, shape: LayerShape, kv_dtype: str) -> float:
    """Return the largest error of the output of one token.

    Args:
        own: Its row [1, row_columns].
        out: Its output [out_columns].
        before: Rows [k | v] of the tokens before it.
        shape: Shape of the layer.
        kv_dtype: Data type that K and V are stored as.
    """
    held = torch.cat([before, own[:, shape.q_columns :]])
    by = own[:, shape.own_q_columns : shape.q_columns].float()
    q = own[:, : shape.own_q_columns].double().view(1, shape.q_heads, shape.k_dim)
    rows = stored_rows(held, shape, kv_dtype)
    exact, v = attend_rows(q, rows, by, shape), rows[:, : shape.v_dim] if shape.latent else rows[:, shape.k_columns :]
    return float((exact.flatten() - out.double()).abs().max() / v.abs().max())
