"""Links over MPI: one communicator per lane, rank 0 of it the S-rank, the others its R-ranks.

Per step the S-rank sends every R-rank the plan. Per layer it sends one message for every piece of work that an
R-rank has, and gets one back when that is done. An R-rank without work in a step gets none. Memory is reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import LayerShape
from hpcdecode.exchange.base import Share, side_by_side
from hpcdecode.exchange.memory import LaneMemory, LaneSpec, Message
from hpcdecode.exchange.partition import RankColumns
from hpcdecode.mpi.wait import Waitable, wait
from hpcdecode.schedule.plan import Plan, wire_length

_PLAN, _QKV, _OUT = 1, 2, 3  # message tags


class _Requests:
    """Several MPI requests as one."""

    def __init__(self) -> None:
        self.requests: list[MPI.Request] = []

    def Test(self) -> bool:
        done = MPI.Request.Testall(self.requests)
        if done:
            self.requests.clear()
        return done


class Outgoing:
    """A message as the S-rank packs it, and unpacks its answer.

    Args:
        rank: of the R-rank in the lane's communicator.
        message: its piece of the layer.
        columns: of q, k, v and o that the R-rank has; None for all.
        device: of q, k, v and o.
    """

    def __init__(self, rank: int, message: Message, columns: RankColumns | None, device: torch.device):
        self.rank, self.message, self.columns = rank, message, columns
        self.rows = _index(message.piece.decode_rows, device)
        self.prompts = _index(message.piece.prefill_rows, device)

    def pack(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the R-rank's rows of q, k and v to the message."""
        if self.columns:
            q, k, v = q[:, self.columns.q], k[:, self.columns.k], v[:, self.columns.v]
        whole = side_by_side(q, k, v)
        _gather((q, k, v) if whole is None else (whole,), self.rows, self.message.rows)
        _gather((k, v), self.prompts, self.message.prompts)

    def unpack(self, o: Tensor) -> None:
        """Write what came back to the R-rank's rows of o."""
        if self.columns:
            o = o[:, self.columns.o]
        if isinstance(self.rows, slice):
            o[self.rows] = self.message.out
        else:
            o.index_copy_(0, self.rows, self.message.out)


class MpiSLink:
    """The S-rank's end of a lane. All ranks of the lane give the same `spec`, but for its device.

    Attributes:
        graph: communicator of its own, for collectives, if it has one.
    """

    graph: MPI.Distgraphcomm | None = None

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec):
        self.comm, self.spec = comm, spec
        self._memory = LaneMemory(comm, spec)
        self._plan = np.zeros(wire_length(spec.slots, comm.size - 1), np.int32)
        self._plans, self._sent, self._answers = _Requests(), _Requests(), _Requests()
        self._shares: list[Share] = []
        self._by_shape: dict[LayerShape, list[Outgoing]] = {}
        self._current: list[Outgoing] = []

    def send_plan(self, plan: Plan) -> None:
        """Send the plan of the lane's next step to every R-rank."""
        message = [self._plan[: self._share_out(plan)], MPI.INT32_T]
        self._plans.requests += [self.comm.Isend(message, rank, _PLAN) for rank in range(1, self.comm.size)]

    def _share_out(self, plan: Plan) -> int:
        """Write the plan to the wire, once that is free, and settle each R-rank's share; return the plan's length."""
        wait(self._plans)
        length = plan.encode(self._plan)
        partition, pieces = self.spec.partition, 1 if plan.collective else self.spec.pieces
        self._shares = [Share(plan, partition.named(rank), count=pieces) for rank in range(self.comm.size - 1)]
        self._by_shape = {}
        return length

    def send_qkv(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """Pack each piece and send it at once, so that its R-rank can begin."""
        self._begin(layer, o)
        for outgoing in self._current:
            outgoing.pack(q, k, v)
            self._exchange(outgoing)

    def pack(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """Pack all pieces, which a device may do later; `send_packed` is the rest of `send_qkv`."""
        self._begin(layer, o)
        for outgoing in self._current:
            outgoing.pack(q, k, v)

    def send_packed(self) -> None:
        """Send what was packed."""
        for outgoing in self._current:
            self._exchange(outgoing)

    def _begin(self, layer: int, o: Tensor) -> None:
        current = self._outgoing(self.spec.shapes[layer], o.device)
        wait(self._sent)
        self._target, self._current = o, current

    def _exchange(self, outgoing: Outgoing) -> None:
        message, rank = outgoing.message, outgoing.rank
        self._answers.requests.append(self.comm.Irecv(message.answer, rank, _OUT))
        self._memory.sync()
        self._sent.requests.append(self.comm.Isend(message.qkv, rank, _QKV))

    def done(self) -> bool:
        """Return whether all answers have come."""
        return self._answers.Test()

    def wait(self) -> None:
        """Return when all answers have come."""
        wait(self._answers)

    def recv_output(self) -> None:
        """Unpack the answers into o."""
        self._memory.sync()
        for outgoing in self._current:
            outgoing.unpack(self._target)

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicator; every rank calls this."""
        wait(self._plans)
        wait(self._sent)
        self._by_shape, self._current = {}, []
        self._memory.close()
        self.comm.Free()

    def _outgoing(self, shape: LayerShape, device: torch.device) -> list[Outgoing]:
        """Return the messages of a layer of `shape`, piece by piece, so that every R-rank can begin soon."""
        if shape not in self._by_shape:
            partition = self.spec.partition
            own = partition.shape(shape)
            each = [m.messages(share, own) for m, share in zip(self._memory.ranks, self._shares, strict=True)]
            columns = [partition.columns(shape, rank) if partition.by_head else None for rank in range(len(each))]
            self._by_shape[shape] = [
                Outgoing(rank + 1, each[rank][i], columns[rank], device)
                for i in range(max(map(len, each)))
                for rank in range(len(each))
                if i < len(each[rank])
            ]
        return self._by_shape[shape]


class MpiRLink:
    """An R-rank's end of a lane: the requests that its program waits for, and their data.

    Args:
        comm: of the lane.
        spec: as the S-rank has it, but for its device.
        first_slot: of the KV cache, the first that is the lane's.

    Attributes:
        shapes: of this R-rank's part of every layer.
        share: what the last plan asks of this R-rank.
        graph: communicator of its own, for collectives, if it has one.
    """

    share: Share
    graph: MPI.Distgraphcomm | None = None

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec, first_slot: int = 0):
        self.comm, self.spec, self.first_slot = comm, spec, first_slot
        self.shapes = list(map(spec.partition.shape, spec.shapes))
        self._memory = LaneMemory(comm, spec)
        self._plan = np.zeros(wire_length(spec.slots, comm.size - 1), np.int32)
        self._sent = _Requests()
        self._by_shape: dict[LayerShape, list[Message]] = {}

    def recv_plan(self) -> Waitable:
        """Return a request that is complete once a plan has come."""
        return self.comm.Irecv([self._plan, MPI.INT32_T], 0, _PLAN)

    def take_plan(self) -> Plan:
        """Return the plan that has come."""
        plan = Plan.decode_from(self._plan)
        named = self.spec.partition.named(self.comm.rank - 1)
        self.share = Share(plan, named, self.first_slot, 1 if plan.collective else self.spec.pieces)
        self._by_shape = {}
        return plan

    def recv_qkv(self, layer: int) -> Iterator[tuple[MPI.Request, Message]]:
        """Yield a layer's messages, each with its request; once that is complete call `take_qkv`, then read it."""
        shape = self.shapes[layer]
        if shape not in self._by_shape:
            self._by_shape[shape] = self._memory.ranks[0].messages(self.share, shape)
        wait(self._sent)
        messages = self._by_shape[shape]
        requests = [self.comm.Irecv(message.qkv, 0, _QKV) for message in messages]
        yield from zip(requests, messages, strict=True)

    def take_qkv(self) -> None:
        """Make what was announced visible to this rank."""
        self._memory.sync()

    def send_output(self, message: Message) -> None:
        """Send the output of a piece back."""
        self._memory.sync()
        self._sent.requests.append(self.comm.Isend(message.answer, 0, _OUT))

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicator; every rank calls this."""
        wait(self._sent)
        self._by_shape = {}
        self._memory.close()
        self.comm.Free()


def _index(rows: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """Return an index of ascending rows, a slice if they follow one another."""
    if len(rows) == 0 or rows[-1] - rows[0] == len(rows) - 1:
        first = int(rows[0]) if len(rows) else 0
        return slice(first, first + len(rows))
    return torch.from_numpy(rows).to(device)


def _gather(blocks: Sequence[Tensor], rows: slice | Tensor, out: Tensor) -> None:
    """Write `rows` of the blocks side by side to out."""
    if not len(out):
        return
    if len(blocks) == 1 and not isinstance(rows, slice):
        torch.index_select(blocks[0], 0, rows, out=out)
        return
    at = 0
    for block in blocks:
        out[:, at : at + block.shape[1]] = block[rows]
        at += block.shape[1]


def subset(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of `ranks` of comm, in this order; only they call this."""
    group = comm.group.Incl(list(ranks))
    try:
        return comm.Create_group(group)
    finally:
        group.Free()


def lane_communicators(
    comm: MPI.Intracomm, groups: Sequence[Sequence[int]], lanes: Sequence[int]
) -> list[MPI.Intracomm]:
    """Return the communicator of every lane of this rank, by group and lane.

    Args:
        comm: of all ranks.
        groups: ranks in it of each group, its S-rank first.
        lanes: number of lanes of each group.
    """
    of_lanes = chain.from_iterable([number] * count for number, count in enumerate(lanes))
    return [subset(comm, groups[number]) for number in of_lanes if comm.rank in groups[number]]
