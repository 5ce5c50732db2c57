"""Seconds of what a device does: by its own time, or by this host's until all of it is done."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcdecode.attention.clocks import clock_of
from hpcdecode.report.benchmark import seconds_of


def device_seconds(work: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Return the seconds of one call of `work`, the mean of `times` calls in a row.

    On CUDA they lie between two events on the current stream: the first, as the device is idle, begins with the host.

    Args:
        work: What tells the device what to do, on its current stream.
        device: The device.
        times: Calls whose work the device does one after the other, while the host is ahead.
    """
    clock = clock_of(device)
    wait_for(device)
    with clock:
        for _ in range(times):
            work()
    return clock.seconds() / times


def seconds_of_all(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds, by this host's time, of `work` and of all that it tells the device on any stream."""

    def all_of_it() -> None:
        work()
        wait_for(device)

    wait_for(device)
    return seconds_of(all_of_it)


def copy_bytes_per_second(half: Tensor, other: Tensor, times: int = 1) -> float:
    """Return the bytes per second, read and written, of copying a tensor to another one on its device."""
    return 2 * half.nbytes / device_seconds(lambda: other.copy_(half), half.device, times)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
