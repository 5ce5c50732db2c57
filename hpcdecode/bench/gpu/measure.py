"""Rates of a device's work against copying on it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcdecode.bench.device_clock import copy_bytes_per_second, device_seconds
from hpcdecode.bench.output import Case
from hpcdecode.report.benchmark import case

_COPIED = 1 << 29  # bytes of each of two tensors; more than an L2 cache holds


def repeats(device: torch.device) -> int:
    """Return how many calls in a row are timed as one, so that a GPU does not wait for its host in between."""
    return 8 if device.type == "cuda" else 1


def against_copies(
    about: str, work: Callable[[], None], nbytes: Callable[[], int], device: torch.device, passes: int
) -> Case:
    """Return the GB/s of `work` against copying on the device, in turn.

    Args:
        about: Name of the case.
        work: What is timed.
        nbytes: Returns the bytes that all calls of `work` so far have moved.
        device: The device.
        passes: Number of measurements, after one that does not count.
    """
    half = torch.empty(_COPIED if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    other, times = torch.empty_like(half), repeats(device)
    rates, ratios = [], []
    for _ in range(passes + 1):
        copying, before = copy_bytes_per_second(half, other, times), nbytes()
        seconds = device_seconds(work, device, times)
        rates.append((nbytes() - before) / times / seconds)
        ratios.append(rates[-1] / copying)
    return case(about, [r / 1e9 for r in rates[1:]], "GB/s", "copying on the device", ratios[1:])
