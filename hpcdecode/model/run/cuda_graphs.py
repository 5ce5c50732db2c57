"""CUDA graphs: work of a GPU that is launched as a whole."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hpcdecode.model.run.recorder import Unrecordable


class GraphRecorder:
    """Records CUDA graphs that share one pool of scratch memory: they are replayed one after another.

    Work is captured on a stream of its own, on which it has run before. So kernels are loaded, cuBLAS has its workspace
    there, and torch's compiler has compiled what it is to compile. What the work allocates comes from the pool; it must
    keep none of it.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Run `work` twice, capture it, and return what replays it on the current stream.

        Raises:
            Unrecordable: If it waits for the device, or does what a graph cannot hold.
        """
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), _without_garbage_collection():
                work()
                _run_without_waits(work)
                torch.cuda.synchronize(self.device)
                self._capture(graph, work)
        finally:
            current.wait_stream(self._stream)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object]) -> None:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            try:
                work()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            raise Unrecordable(str(error)) from error


def _run_without_waits(work: Callable[[], object]) -> None:
    """Run work; raise Unrecordable if it would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise Unrecordable(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Let nothing on the device be freed by chance while a graph is captured."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
