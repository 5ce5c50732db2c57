"""Seconds of what a device does, all of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcdecode.report.benchmark import seconds_of


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work` and of all that it tells the device."""

    def all_of_it() -> None:
        work()
        _wait(device)

    _wait(device)
    return seconds_of(all_of_it)


def copy_bytes_per_second(half: Tensor, other: Tensor) -> float:
    """Return the bytes per second, read and written, of copying a tensor to another one on its device."""
    return 2 * half.nbytes / device_seconds(lambda: other.copy_(half), half.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
