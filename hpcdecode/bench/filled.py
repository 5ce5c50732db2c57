"""A KV store whose rows are known: what benchmarks read, and how they check the answers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention.base import LayerShape
from hpcdecode.attention.reference import attend_one, stored

LENGTHS = (1, 100, 1500)  # of the sequences that are checked
_ROWS = 1024  # random ones, repeated
_TOLERANCE = 2e-2  # share of max |v|; bfloat16 activations


def capacity(lengths: tuple[int, ...]) -> int:
    """Tokens that a store needs for sequences of these lengths, whatever its block."""
    return sum(-(-n // 64) * 64 for n in lengths)


def fill(store: Any, shape: LayerShape, lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Sequences of `lengths` tokens in slots 0, 1, ...; returns the rows that they repeat, bfloat16
    [_ROWS, kv_columns]."""
    rows = torch.randn(_ROWS, shape.kv_columns, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    for slot, length in enumerate(lengths):
        for start, end in pairwise([*range(0, length, _ROWS), length]):
            store.extend([slot], [end - start])
            store.append(0, [slot], [end - start], rows[: end - start])
    return rows


def decode(
    shape: LayerShape, n: int, device: torch.device | str = "cpu"
) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """What `attend` takes for one token of each of n sequences: slots, counts, qkv and out."""
    qkv = torch.randn(n, shape.row_columns, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    out = torch.empty(n, shape.out_columns, dtype=torch.bfloat16, device=device)
    return np.arange(n, dtype=np.int32), np.ones(n, np.int32), qkv, out


def verify(store: Any, shape: LayerShape, kv_dtype: str, device: torch.device | str = "cpu") -> None:
    """RuntimeError where an empty store's answers for sequences of LENGTHS do not match float64."""
    rows = fill(store, shape, LENGTHS, device).cpu()
    slots, counts, qkv, out = decode(shape, len(LENGTHS), device)
    store.attend(0, slots, counts, qkv, out)
    for i, length in enumerate(LENGTHS):
        own = qkv[i : i + 1].cpu()
        held = torch.cat([rows.repeat(2, 1)[: length - 1], own[:, shape.q_columns :]])
        k, v = held.split([shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim], dim=1)
        k, v = (stored(x.unflatten(1, (shape.kv_heads, -1)), kv_dtype).double() for x in (k, v))
        q = own[:, : shape.q_columns].double().view(1, shape.q_heads, shape.k_dim)
        error = (attend_one(q, k, v, shape).flatten() - out[i].cpu().double()).abs().max().item()
        if error > _TOLERANCE * v.abs().max().item():
            raise RuntimeError(f"{kv_dtype}, {shape}, length {length}: error {error:.3g} is out of bounds")
