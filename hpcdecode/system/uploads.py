"""Arrays on a device, by copies that nothing waits for."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return arrays on a device: on the CPU as they are, elsewhere by one copy from pinned memory.

    Torch keeps the pinned memory until the copy is done.

    Args:
        device: Where to.
        arrays: Of any shapes and dtypes that torch has.
    """
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type == "cpu":
        return tensors
    sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tensors]
    starts = list(accumulate(sizes, initial=0))
    pinned = device.type == "cuda" and torch.cuda.is_initialized()
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
    for x, start in zip(tensors, starts, strict=False):
        _part(host, start, x).copy_(x)
    there = host.to(device, non_blocking=True)
    return [_part(there, start, x) for x, start in zip(tensors, starts, strict=False)]


def _part(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes from `start` on as a tensor of the dtype and shape of another."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
