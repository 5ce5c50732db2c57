"""Lanes without a model, to time their links: R-ranks send the first columns of q back in place of attending."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from mpi4py import MPI

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange.collective import CollectiveRLink, CollectiveSLink
from hpcdecode.exchange.memory import LaneSpec, shared_bytes
from hpcdecode.exchange.mpi import MpiRLink, MpiSLink
from hpcdecode.exchange.partition import Partition
from hpcdecode.mpi.wait import wait
from hpcdecode.schedule.plan import Plan


class LinkEnd(Protocol):
    """One rank's end of a lane whose R-ranks answer every layer with the first columns of q."""

    def round(self) -> None:
        """Exchange one layer."""

    def left_after(self, work: Callable[[], None]) -> float:
        """Exchange one layer; on the S-rank do `work` while it is under way, and return the seconds left after it."""

    def verify(self) -> None:
        """Exchange one layer; raise RuntimeError on the S-rank if what comes back is not what was sent."""

    def close(self) -> None:
        """Close the link."""


def lane_end(comm: MPI.Intracomm, shape: LayerShape, rows: int, way: str) -> LinkEnd:
    """Return this rank's end of a lane of `rows` sequences; rank 0 is the S-rank. way: `messages` or `collective`."""
    return (_REnd if comm.rank else _SEnd)(comm, shape, rows, way)


def _lane_spec(comm: MPI.Intracomm, shape: LayerShape, rows: int, way: str) -> LaneSpec:
    dtype = torch.bfloat16
    shared = shared_bytes([shape], rows, 0, dtype) if way == "messages" else (0, 0)
    return LaneSpec([shape], rows, dtype, Partition("request", comm.size - 1), shared)


class _SEnd:
    """The S-rank's end, and what it sends."""

    def __init__(self, comm: MPI.Intracomm, shape: LayerShape, rows: int, way: str):
        spec, parts = _lane_spec(comm, shape, rows, way), comm.size - 1
        self.link = (CollectiveSLink if way == "collective" else MpiSLink)(comm.Dup(), spec)
        decode = np.stack([np.arange(rows) % parts, np.arange(rows) // parts], axis=1).astype(np.int32)
        self.link.send_plan(Plan(decode=decode))
        qkv = torch.randn(rows, shape.row_columns).to(spec.dtype)
        self.q, self.k, self.v = qkv.split([shape.q_columns, shape.k_columns, shape.v_columns], dim=1)
        self.o = torch.zeros(rows, shape.out_columns, dtype=spec.dtype)

    def round(self) -> None:
        self.link.send_rows(0, (self.q, self.k, self.v), self.o)
        wait(self.link)
        self.link.recv_output()

    def left_after(self, work: Callable[[], None]) -> float:
        self.link.send_rows(0, (self.q, self.k, self.v), self.o)
        work()
        start = perf_counter()
        wait(self.link)
        self.link.recv_output()
        return perf_counter() - start

    def verify(self) -> None:
        self.round()
        if not torch.equal(self.o, self.q[:, : self.o.shape[1]]):
            raise RuntimeError("exchange: what came back is not what was sent")

    def close(self) -> None:
        self.link.close()


class _REnd:
    """An R-rank's end."""

    def __init__(self, comm: MPI.Intracomm, shape: LayerShape, rows: int, way: str):
        self._out_columns = shape.out_columns
        self.link = (CollectiveRLink if way == "collective" else MpiRLink)(
            comm.Dup(), _lane_spec(comm, shape, rows, way)
        )
        wait(self.link.recv_plan())
        self.link.take_plan()

    def round(self) -> None:
        for request, message in self.link.recv_rows(0):
            wait(request)
            message.out.copy_(message.rows[:, : self._out_columns])
            self.link.send_output(message)

    def left_after(self, work: Callable[[], None]) -> float:
        self.round()
        return 0.0

    def verify(self) -> None:
        self.round()

    def close(self) -> None:
        self.link.close()
