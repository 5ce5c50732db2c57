"""How many sequences a GPU should decode at once: where its GEMMs come to be bound by arithmetic, not by weights."""

from __future__ import annotations

import functools
from time import perf_counter

import torch

from hpcdecode.attention.cuda import copy_rate

RIDGES = 4  # times the ridge point: weights are then read in a quarter of the time that the arithmetic takes
STEP = 256  # sequences that a lane's B is a multiple of
_ROWS, _WIDTH = 4096, 8192  # of the GEMM that is measured
_CALLS = 5


def lane_batch(flops: float, bytes_per_second: float, itemsize: int) -> int:
    """Return the most sequences of a lane that are worth the time they take, a multiple of STEP.

    A GEMM of T tokens takes 2 T FLOP for each weight, and reads its bytes. Both take as long at T = flops * itemsize /
    (2 * bytes_per_second), the ridge point: 300 to 320 on an H100 in bfloat16. Below it tokens are free; far beyond it
    more of them only make a step longer.

    Args:
        flops: FLOP/s of large GEMMs.
        bytes_per_second: At which weights are read.
        itemsize: Bytes of a weight.
    """
    ridge = flops * itemsize / (2 * bytes_per_second)
    return max(-(-int(RIDGES * ridge) // STEP), 1) * STEP


@functools.cache
def measured_lane_batch(device: str, dtype: str) -> int:
    """Return `lane_batch` by the FLOP/s and bytes/s of a device, measured in some tens of milliseconds.

    Args:
        device: A CUDA device.
        dtype: Of weights and activations.
    """
    kind: torch.dtype = getattr(torch, dtype)
    return lane_batch(gemm_rate(torch.device(device), kind), copy_rate(torch.device(device)), kind.itemsize)


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a GEMM that is bound by arithmetic."""
    x, weight = (torch.randn(rows, _WIDTH, dtype=dtype, device=device) for rows in (_ROWS, _WIDTH))
    seconds: list[float] = []
    for _ in range(_CALLS):
        torch.cuda.synchronize(device)
        begun = perf_counter()
        x @ weight.t()
        torch.cuda.synchronize(device)
        seconds.append(perf_counter() - begun)
    return 2.0 * _ROWS * _WIDTH * _WIDTH / min(seconds)
