"""GPUs: those that a process sees, where they are attached, and the one that a thread works on."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

UNKNOWN_NODE = -1
_NUMA_NODE = "/sys/bus/pci/devices/{}/numa_node"
_NO_GPU = ("No CUDA GPUs are available", "Found no NVIDIA driver")  # how torch says so


class Gpu(NamedTuple):
    """A GPU that this process sees.

    Attributes:
        name: Its UUID, by which all processes know it; its number if the driver gives none.
        node: NUMA node that it is attached to; UNKNOWN_NODE if the system does not tell.
    """

    name: str
    node: int


class VisibleGpus(NamedTuple):
    """The GPUs that this process sees.

    Attributes:
        gpus: In torch's order; none on a host without GPUs, or if they cannot be used.
        trouble: Why they cannot be used, in torch's words, such as a driver older than the toolkit; or empty.
    """

    gpus: list[Gpu]
    trouble: str = ""


def visible_gpus() -> VisibleGpus:
    """Return the GPUs that this process sees. No context is made on them."""
    import torch

    if not torch.backends.cuda.is_built():
        return VisibleGpus([])
    try:
        torch.cuda.init()
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        known = any(text in str(error) for text in _NO_GPU)
        return VisibleGpus([], "" if known else str(error).strip().partition("\n")[0])
    return VisibleGpus([Gpu(str(getattr(own, "uuid", i)), _node(own)) for i, own in enumerate(properties)])


def _node(properties: torch._C._CudaDeviceProperties) -> int:
    """Return the NUMA node of a GPU, by its place on the PCI bus."""
    try:
        domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        with open(_NUMA_NODE.format(f"{domain:04x}:{bus:02x}:{device:02x}.0")) as file:
            return max(int(file.read()), UNKNOWN_NODE)
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_NODE


def use_gpu(device: torch.device | str) -> None:
    """Make a GPU the current device of the calling thread; nothing for the CPU.

    A thread begins with device 0. A context of it takes 0.5 GB, and MPI takes memory to be of the current device.
    """
    import torch

    if (device := torch.device(device)).type == "cuda":
        torch.cuda.set_device(device.index or 0)


def await_gpus() -> None:
    """Wait until this thread's GPU is idle, so that the process can end; nothing if it has used none, or lost it."""
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.cuda.synchronize()
