"""Links over MPI: one communicator per lane, rank 0 of it the S-rank, the others its R-ranks.

Per step a lane posts one Ibcast of the plan, then per layer an Ialltoallv of q, k, v and, if the step decodes
anything, an Ialltoallv of o. Every rank of the lane derives this order from the plan. Buffers are reused.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdecode.attention import LayerShape
from hpcdecode.exchange.base import Share
from hpcdecode.exchange.wait import wait
from hpcdecode.schedule.plan import Plan, wire_length


class _Buffer:
    """Wire memory that grows when a step needs more than any before it."""

    def __init__(self, dtype: torch.dtype):
        self._data = torch.empty(0, dtype=dtype)

    def take(self, elements: int) -> Tensor:
        if elements > len(self._data):
            self._data = torch.empty(elements + elements // 4, dtype=self._data.dtype)
        return self._data[:elements]


def _spec(tensor: Tensor, counts: Seq[int]) -> list:
    """Send or receive specification: `counts[i]` elements of `tensor` for rank i of the lane, in order."""
    sizes = np.asarray(counts, dtype=np.int64) * tensor.element_size()
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    memory = tensor.view(-1).view(torch.uint8).numpy()
    return [memory, (sizes.astype(np.intc), starts.astype(np.intc)), MPI.BYTE]


class MpiSLink:
    """The S-rank's end of a lane."""

    def __init__(self, comm: MPI.Intracomm, shapes: Seq[LayerShape], slots: int, dtype: torch.dtype):
        self.comm, self.shapes = comm, shapes
        self.ranks = comm.size - 1
        self._plan_wire = np.zeros(wire_length(slots, self.ranks), np.int32)
        self._out, self._in = _Buffer(dtype), _Buffer(dtype)
        self._plan_sent = self._rows_sent = self._received = MPI.REQUEST_NULL

    def begin(self, plan: Plan) -> None:
        wait(self._plan_sent)
        plan.encode(self._plan_wire)
        self._plan_sent = self.comm.Ibcast([self._plan_wire, MPI.INT32_T], root=0)
        self._decodes = plan.decode_tokens
        self._shares = [Share(plan, r) for r in range(self.ranks)]
        self._rows = [(torch.from_numpy(s.decode_rows), torch.from_numpy(s.prefill_rows)) for s in self._shares]
        order = np.concatenate([s.decode_rows for s in self._shares])
        self._order = torch.from_numpy(order)

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        shape = self.shapes[layer]
        counts = [s.elements(shape) for s in self._shares]
        wait(self._rows_sent)
        wire = self._out.take(sum(counts))
        self._pack(shape, wire, q, k, v)
        nothing = [0] * self.comm.size
        self._rows_sent = self.comm.Ialltoallv(_spec(wire, [0, *counts]), _spec(wire[:0], nothing))
        if self._decodes:
            self._target = o[: self._decodes]
            rows = self._target if self.ranks == 1 else self._in.take(self._target.numel()).view_as(self._target)
            back = [len(s.decode_rows) * shape.out_columns for s in self._shares]
            self._received = self.comm.Ialltoallv(_spec(rows[:0], nothing), _spec(rows, [0, *back]))
            self._arriving = rows

    def wait(self) -> None:
        if self._decodes:
            wait(self._received)

    def take(self) -> None:
        if self._decodes and self.ranks > 1:
            self._target[self._order] = self._arriving

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the lane's communicator."""
        wait(self._plan_sent)
        wait(self._rows_sent)
        self.comm.Free()

    def _pack(self, shape: LayerShape, wire: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        at = 0
        for decode, prefill in self._rows:
            for rows, parts, width in ((decode, (q, k, v), shape.row_columns), (prefill, (k, v), shape.kv_columns)):
                if not len(rows):
                    continue
                target = wire[at : at + len(rows) * width].view(len(rows), width)
                torch.cat([part[rows] for part in parts], dim=1, out=target)
                at += target.numel()


class MpiRLink:
    """An R-rank's end of a lane: the requests that its program waits for, and their data."""

    def __init__(self, comm: MPI.Intracomm, shapes: Seq[LayerShape], slots: int, first_slot: int, dtype: torch.dtype):
        self.comm, self.shapes, self.first_slot = comm, shapes, first_slot
        self._plan_wire = np.zeros(wire_length(slots, comm.size - 1), np.int32)
        self._in, self._out = _Buffer(dtype), _Buffer(dtype)
        self._nothing = [0] * comm.size
        self._sent = MPI.REQUEST_NULL

    def receive_plan(self) -> MPI.Request:
        return self.comm.Ibcast([self._plan_wire, MPI.INT32_T], root=0)

    def plan(self) -> Plan:
        """The plan that has arrived."""
        plan = Plan.decode_from(self._plan_wire)
        self.share = Share(plan, self.comm.rank - 1, self.first_slot)
        return plan

    def receive_rows(self, layer: int) -> MPI.Request:
        elements = self.share.elements(self.shapes[layer])
        self._wire = self._in.take(elements)
        counts = [elements, *self._nothing[1:]]
        return self.comm.Ialltoallv(_spec(self._wire[:0], self._nothing), _spec(self._wire, counts))

    def rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """What has arrived: decode rows [q | k | v], prefill rows [k | v], and the o to be written."""
        shape, decodes = self.shapes[layer], len(self.share.decode_rows)
        split = decodes * shape.row_columns
        rows = self._wire[:split].view(decodes, shape.row_columns)
        prompts = self._wire[split:].view(-1, shape.kv_columns)
        wait(self._sent)
        out = self._out.take(decodes * shape.out_columns).view(decodes, shape.out_columns)
        return rows, prompts, out

    def send(self, out: Tensor) -> None:
        """Send o back; every R-rank of the lane calls this in a step that decodes anything on any of them."""
        counts = [out.numel(), *self._nothing[1:]]
        self._sent = self.comm.Ialltoallv(_spec(out, counts), _spec(out[:0], self._nothing))

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the lane's communicator."""
        wait(self._sent)
        self.comm.Free()


def subset(comm: MPI.Intracomm, ranks: Seq[int]) -> MPI.Intracomm:
    """A communicator of `ranks` of comm, in this order; only they call this."""
    group = comm.group.Incl(list(ranks))
    try:
        return comm.Create_group(group)
    finally:
        group.Free()


def lane_communicators(
    comm: MPI.Intracomm, s_ranks: Seq[int], r_ranks: Seq[int], lanes: Seq[int]
) -> list[tuple[int, MPI.Intracomm]]:
    """(index of the S-rank, communicator) of every lane that this rank takes part in, by S-rank and lane.

    lanes: number of lanes of each S-rank.
    """
    return [
        (s, subset(comm, [s_rank, *r_ranks]))
        for s, s_rank in enumerate(s_ranks)
        if comm.rank == s_rank or comm.rank in r_ranks
        for _ in range(lanes[s])
    ]
