"""Copies between frames of a GPU's memory and memory of this host, beside what the GPU computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from hpcdecode.system.gpus import use_gpu
from hpcdecode.system.swap_tiers import memory_for
from hpcdecode.system.tier import Chunk

Runs = Sequence[tuple[int, int]]  # begin and end, in bytes of a frame
_SLAB = 256 << 20  # bytes of pinned memory that are allocated at once, a power of two as torch does


class FrameCopies(Protocol):
    """Copies to and from frames. They come behind what the device was told to compute until the last `told`."""

    def told(self) -> None:
        """Have copies to come wait for all that the device has been told to compute."""

    def memory(self, nbytes: int) -> Chunk:
        """Return memory of this host that the device copies from and to, uint8 [nbytes]."""

    def out(self, frame: int, runs: Runs, to: Chunk) -> None:
        """Copy parts of a frame to the same places of memory, and wait for that; called by threads that move."""

    def into(self, frame: int, runs: Runs, data: Chunk) -> None:
        """Copy parts of a frame from memory, and wait for that; called by threads that move."""


class HostFrames:
    """Frames in this host's memory, as the emulation of a device has them.

    Args:
        frames: uint8 [frames, bytes].
    """

    def __init__(self, frames: Tensor):
        self._frames = frames

    def told(self) -> None:
        """Do nothing: what was computed is done."""

    def memory(self, nbytes: int) -> Chunk:
        """Return any memory."""
        return memory_for(nbytes)

    def out(self, frame: int, runs: Runs, to: Chunk) -> None:
        """Copy parts of a frame to memory."""
        for begin, end in runs:
            torch.from_numpy(to)[begin:end] = self._frames[frame, begin:end]

    def into(self, frame: int, runs: Runs, data: Chunk) -> None:
        """Copy parts of a frame from memory."""
        for begin, end in runs:
            self._frames[frame, begin:end] = torch.from_numpy(data)[begin:end]


class CudaFrames:
    """Frames in a GPU's memory, with a stream for each direction.

    Args:
        frames: uint8 [frames, bytes], on the GPU.
    """

    def __init__(self, frames: Tensor):
        self._frames, self._device = frames, frames.device
        self._streams = {name: torch.cuda.Stream(self._device) for name in ("out", "in")}
        self._pinned = PinnedMemory(self._device)
        self.told()

    def told(self) -> None:
        """Record an event behind what the GPU's current stream has been told."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._computed = event

    def memory(self, nbytes: int) -> Chunk:
        """Return pinned memory."""
        return self._pinned.take(nbytes)

    @torch.inference_mode()
    def out(self, frame: int, runs: Runs, to: Chunk) -> None:
        """Copy parts of a frame to memory, and wait for that."""
        host, there = torch.from_numpy(to), self._frames[frame]
        self._copy("out", [(host[begin:end], there[begin:end]) for begin, end in runs])

    @torch.inference_mode()
    def into(self, frame: int, runs: Runs, data: Chunk) -> None:
        """Copy parts of a frame from memory, and wait for that."""
        host, there = torch.from_numpy(data), self._frames[frame]
        self._copy("in", [(there[begin:end], host[begin:end]) for begin, end in runs])

    def _copy(self, stream: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        use_gpu(self._device)  # of this thread
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._streams[stream]):
            self._streams[stream].wait_event(self._computed)
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            copied.record()
        copied.synchronize()


class PinnedMemory:
    """Pieces of pinned memory, which is allocated many of them at once, since that waits for the GPU.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, nbytes: int) -> Chunk:
        """Return a piece, uint8 [nbytes]."""
        with self._lock:
            if self._used + nbytes > len(self._slab):
                use_gpu(self._device)  # of this thread: else it would begin to use the first one
                self._slab, self._used = torch.empty(max(_SLAB, nbytes), dtype=torch.uint8, pin_memory=True), 0
            piece: Chunk = self._slab[self._used : self._used + nbytes].numpy()
            self._used += nbytes
        return piece


def frame_copies(frames: Tensor) -> FrameCopies:
    """Return what copies to and from frames, uint8 [frames, bytes]."""
    return CudaFrames(frames) if frames.device.type == "cuda" else HostFrames(frames)


def link_rate(device: torch.device, nbytes: int) -> float:
    """Return the bytes a second that come from pinned memory to a GPU, in copies of `nbytes`."""
    frames = torch.empty(4, nbytes, dtype=torch.uint8, device=device)
    copies = CudaFrames(frames)
    memory, seconds = copies.memory(nbytes), []
    for i in range(12):
        begin = perf_counter()
        copies.into(i % 4, [(0, nbytes)], memory)
        seconds.append(perf_counter() - begin)
    return nbytes / sorted(seconds)[len(seconds) // 2]
