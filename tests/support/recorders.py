"""Stand-ins for CUDA graphs: work is done again over the same memory, in place of being replayed by a device."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpcdecode.model.lower.compile import compile_graph
from hpcdecode.model.run import bound_slice
from hpcdecode.model.run.recorder import Unrecordable

aten = torch.ops.aten
READS_BACK = {aten._local_scalar_dense.default, aten.nonzero.default, aten.unique_consecutive.default}


class _NoWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS_BACK:
            raise Unrecordable(str(func))
        return func(*args, **(kwargs or {}))


class EagerRecorder:
    """Does recorded work again, and counts what it recorded and replayed.

    Like a graph it cannot record what reads results back; watched: whether it looks for that, which torch's compiler
    does not allow.
    """

    def __init__(self, watched=True):
        self.watched, self.recorded, self.replayed = watched, 0, 0

    def record(self, work):
        with _NoWaits() if self.watched else nullcontext():
            work()
        self.recorded += 1

        def replay():
            self.replayed += 1
            work()

        return replay


def as_on_a_device(monkeypatch, *, inductor=False):
    """Let models on the CPU run the slices that other devices run."""
    device = torch.device("meta")
    monkeypatch.setattr(
        bound_slice,
        "compile_graph",
        lambda graph, _, weights, _inductor, **kwargs: compile_graph(graph, device, weights, inductor, **kwargs),
    )
