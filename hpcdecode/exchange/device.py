"""A device that computes and copies what it is told, in order, on streams; and memory of lanes that it reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.mpi.wait import Waitable
from hpcdecode.system.uploads import upload

Pairs = Sequence[tuple[Tensor, Tensor]]  # to, from
_PORTABLE = 1  # flag of cudaHostRegister: for all contexts of the process
logger = logging.getLogger(__name__)


class Queue(Protocol):
    """A device that computes what it is told, in order."""

    def tell(self, work: Callable[[], None]) -> Waitable:
        """Call `work`, which tells the device what to compute; return a mark that comes behind it."""


class Copies(Protocol):
    """Copies in both directions, each behind what the device has been told to compute when it is asked for."""

    def out(self, pairs: Pairs) -> Waitable:
        """Copy from the device to pinned memory. The tensors must stay as they are until the mark is done."""

    def into(self, pairs: Pairs, after: Waitable) -> None:
        """Copy from pinned memory to the device.

        The copy comes after the computing that `after` came behind, and before any to come.
        """

    def pinned(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the host, [rows, columns]."""


class Accelerator(Queue, Copies, Protocol):
    """Computing, copies and memory of one device."""

    def out_parts(self, parts: Sequence[Pairs], after: Waitable) -> Sequence[Waitable]:
        """Copy from the device part by part, behind the computing that `after` comes behind; return a mark of each."""

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the device, [size]."""

    def upload(self, numbers: NDArray[np.int64]) -> Tensor:
        """Copy numbers to the device, before any computing to come."""

    def holds(self, memory: Tensor) -> bool:
        """Return whether it is memory of the device."""


class Memory(Protocol):
    """Where a rank has the memory of a lane."""

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory that is not shared, [size]."""

    def pin(self, address: int, nbytes: int) -> None:
        """Register memory that is shared, so that the rank's device copies from and to it beside other work."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""


class PlainMemory:
    """Memory of the host that no device reads."""

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory, [size]."""
        return torch.empty(size, dtype=dtype)

    def pin(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def unpin(self, address: int) -> None:
        """Do nothing."""


class CudaMemory:
    """Memory that a GPU reads: pinned, or its own if MPI takes that.

    Args:
        private: Where memory is that is not shared.
    """

    def __init__(self, private: torch.device):
        self.private = private
        self._pinned: set[int] = set()

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory, [size]."""
        if self.private.type == "cpu":
            return torch.empty(size, dtype=dtype, pin_memory=True)
        return torch.empty(size, dtype=dtype, device=self.private)

    def pin(self, address: int, nbytes: int) -> None:
        """Register memory of the host; without it copies still work, but wait for the device."""
        problem = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if problem:
            logger.warning(f"exchange: {nbytes} bytes of shared memory are not pinned (CUDA error {problem})")
        else:
            self._pinned.add(address)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        if address in self._pinned:
            self._pinned.remove(address)
            torch.cuda.cudart().cudaHostUnregister(address)


def open_memory(private: torch.device, device: torch.device) -> Memory:
    """Return where a rank has the memory of its lanes.

    Args:
        private: Of what it does not share.
        device: That computes with what lies there.
    """
    return PlainMemory() if device.type == "cpu" else CudaMemory(private)


class CudaMark:
    """Two points of a device's work: what was computed, and what was copied behind it."""

    def __init__(self, computed: torch.cuda.Event, copied: torch.cuda.Event):
        self.computed, self.copied = computed, copied

    def Test(self) -> bool:
        """Return whether the device has come past both."""
        return bool(self.copied.query())


def _computed(mark: Waitable) -> torch.cuda.Event:
    if not isinstance(mark, CudaMark):
        raise TypeError(f"after: expected a mark of this device, got {type(mark).__name__}")
    return mark.computed


class CudaCopies:
    """Copies on two streams of their own, one a direction; ordered with the computing by events."""

    def __init__(self, device: torch.device):
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, pairs: Pairs) -> Waitable:
        """Copy from the device to pinned memory."""
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        (mark,) = self.out_parts([pairs], CudaMark(computed, computed))
        return mark

    def out_parts(self, parts: Sequence[Pairs], after: Waitable) -> Sequence[Waitable]:
        """Copy from the device to pinned memory part by part; return a mark of each."""
        computed, marks = _computed(after), []
        self._out.wait_event(computed)
        with torch.cuda.stream(self._out):
            for pairs in parts:
                for host, there in pairs:
                    host.copy_(there, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record(self._out)
                marks.append(CudaMark(computed, copied))
        return marks

    def into(self, pairs: Pairs, after: Waitable) -> None:
        """Copy from pinned memory to the device."""
        copied = torch.cuda.Event()
        self._in.wait_event(_computed(after))
        with torch.cuda.stream(self._in):
            for there, host in pairs:
                there.copy_(host, non_blocking=True)
        copied.record(self._in)
        torch.cuda.current_stream(self.device).wait_event(copied)

    def pinned(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory of the host, [rows, columns]."""
        return torch.empty(rows, columns, dtype=dtype, pin_memory=True)


class CudaDevice(CudaCopies):
    """A GPU: it computes on its current stream, and copies beside that."""

    def tell(self, work: Callable[[], None]) -> Waitable:
        """Call `work` and record an event behind it."""
        work()
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        return CudaMark(computed, computed)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the GPU, [size]."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def upload(self, numbers: NDArray[np.int64]) -> Tensor:
        """Copy numbers to the GPU on its current stream."""
        (there,) = upload(self.device, numbers)
        return there

    def holds(self, memory: Tensor) -> bool:
        """Return whether it is memory of a GPU."""
        return memory.device.type == "cuda"
