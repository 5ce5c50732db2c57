"""Links over MPI: one communicator per lane, rank 0 of it the S-rank, the others its R-ranks.

Per step the S-rank sends every R-rank the plan. Per layer it sends one message for every piece of work that an
R-rank has, and gets one back when that is done; an R-rank without work in a step gets none. Memory is reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdecode.attention.base import LayerShape
from hpcdecode.exchange.base import Share, side_by_side
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.wire import HOST, Parcel, Window
from hpcdecode.mpi.wait import wait
from hpcdecode.schedule.plan import Plan, wire_length

_PLAN, _ROWS, _OUT = 1, 2, 3  # message tags


class _All:
    """Several requests as one."""

    def __init__(self) -> None:
        self.requests: list[MPI.Request] = []

    def Test(self) -> bool:
        done = MPI.Request.Testall(self.requests)
        if done:
            self.requests.clear()
        return done


class _Bundle:
    """A parcel as the S-rank packs and opens it.

    columns: of q, k, v and o; None for all. rows, prompts: where its rows are in the lane's, on the lane's device.
    """

    def __init__(self, rank: int, parcel: Parcel, columns: tuple[slice, ...] | None, device: torch.device):
        self.rank, self.parcel, self.columns = rank, parcel, columns
        self.rows = _index(parcel.piece.decode_rows, device)
        self.prompts = _index(parcel.piece.prefill_rows, device)

    def pack(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.columns:
            q, k, v = (block[:, columns] for block, columns in zip((q, k, v), self.columns[:3], strict=True))
        whole = side_by_side(q, k, v)
        _gather((q, k, v) if whole is None else (whole,), self.rows, self.parcel.rows)
        _gather((k, v), self.prompts, self.parcel.prompts)

    def open(self, o: Tensor) -> None:
        if self.columns:
            o = o[:, self.columns[3]]
        if isinstance(self.rows, slice):
            o[self.rows] = self.parcel.out
        else:
            o.index_copy_(0, self.rows, self.parcel.out)


class MpiSLink:
    """The S-rank's end of a lane.

    slots: sequences that the lane may hold; shared: as `Window`; pieces: of the work of an R-rank in a layer. All ranks
    of the lane give the same, and the shapes of whole layers. device: where this rank has what it does not share.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        shapes: Sequence[LayerShape],
        slots: int,
        dtype: torch.dtype,
        shared: tuple[int, int],
        partition: Partition,
        pieces: int = 1,
        device: torch.device = HOST,
    ):
        self.comm, self.shapes, self.partition, self.pieces = comm, shapes, partition, pieces
        self._window = Window(comm, dtype, shared, device)
        self._plan_wire = np.zeros(wire_length(slots, comm.size - 1), np.int32)
        self._plans, self._sent, self._answers = _All(), _All(), _All()

    def begin(self, plan: Plan) -> None:
        wait(self._plans)
        message = [self._plan_wire[: plan.encode(self._plan_wire)], MPI.INT32_T]
        self._plans.requests += [self.comm.Isend(message, rank, _PLAN) for rank in range(1, self.comm.size)]
        self._shares = [
            Share(plan, self.partition.named(rank), count=self.pieces) for rank in range(self.comm.size - 1)
        ]
        self._layers: dict[LayerShape, list[_Bundle]] = {}

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        self._open(layer, o)
        for bundle in self._opened:
            bundle.pack(q, k, v)
            self._exchange(bundle)

    def pack(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """`post` as far as a device does it; `send` is the rest."""
        self._open(layer, o)
        for bundle in self._opened:
            bundle.pack(q, k, v)

    def send(self) -> None:
        for bundle in self._opened:
            self._exchange(bundle)

    def _open(self, layer: int, o: Tensor) -> None:
        bundles = self._bundles(self.shapes[layer], o.device)
        wait(self._sent)
        self._target, self._opened = o, bundles

    def _exchange(self, bundle: _Bundle) -> None:
        self._answers.requests.append(self.comm.Irecv(bundle.parcel.answer, bundle.rank, _OUT))
        self._window.sync()
        self._sent.requests.append(self.comm.Isend(bundle.parcel.message, bundle.rank, _ROWS))

    def done(self) -> bool:
        return self._answers.Test()

    def wait(self) -> None:
        wait(self._answers)

    def take(self) -> None:
        self._window.sync()
        for bundle in self._opened:
            bundle.open(self._target)

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the lane's communicator; every rank calls this."""
        wait(self._plans)
        wait(self._sent)
        self._layers, self._opened = {}, []
        self._window.close()
        self.comm.Free()

    def _bundles(self, shape: LayerShape, device: torch.device) -> list[_Bundle]:
        """Of a layer of this shape, piece by piece, so that every R-rank can begin soon."""
        if shape not in self._layers:
            own = self.partition.shape(shape)
            each = [w.parcels(share, own) for w, share in zip(self._window.wires, self._shares, strict=True)]
            order = sorted((i, rank) for rank, parcels in enumerate(each) for i in range(len(parcels)))
            by_head = self.partition.by_head
            columns = [self.partition.columns(shape, rank) if by_head else None for rank in range(len(each))]
            self._layers[shape] = [_Bundle(rank + 1, each[rank][i], columns[rank], device) for i, rank in order]
        return self._layers[shape]


class MpiRLink:
    """An R-rank's end of a lane: the requests that its program waits for, and their data.

    first_slot: of the KV store's slots, the first that is the lane's. Others as `MpiSLink`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        shapes: Sequence[LayerShape],
        slots: int,
        dtype: torch.dtype,
        shared: tuple[int, int],
        partition: Partition,
        pieces: int = 1,
        first_slot: int = 0,
        device: torch.device = HOST,
    ):
        self.comm, self.partition, self.first_slot, self.pieces = comm, partition, first_slot, pieces
        self.shapes = list(map(partition.shape, shapes))
        self._window = Window(comm, dtype, shared, device)
        self._plan_wire = np.zeros(wire_length(slots, comm.size - 1), np.int32)
        self._sent = _All()

    def receive_plan(self) -> MPI.Request:
        return self.comm.Irecv([self._plan_wire, MPI.INT32_T], 0, _PLAN)

    def plan(self) -> Plan:
        """The plan that has arrived."""
        plan = Plan.decode_from(self._plan_wire)
        self.share = Share(plan, self.partition.named(self.comm.rank - 1), self.first_slot, self.pieces)
        self._layers: dict[LayerShape, list[Parcel]] = {}
        return plan

    def receive(self, layer: int) -> Iterator[tuple[MPI.Request, Parcel]]:
        """The layer's pieces, each with a request; when that is complete, and `opened` was called, it is there."""
        shape = self.shapes[layer]
        if shape not in self._layers:
            self._layers[shape] = self._window.wires[0].parcels(self.share, shape)
        wait(self._sent)
        parcels = self._layers[shape]
        requests = [self.comm.Irecv(parcel.message, 0, _ROWS) for parcel in parcels]
        yield from zip(requests, parcels, strict=True)

    def opened(self) -> None:
        """Make sure that what was announced is seen."""
        self._window.sync()

    def send(self, parcel: Parcel) -> None:
        """Send o of a piece back."""
        self._window.sync()
        self._sent.requests.append(self.comm.Isend(parcel.answer, 0, _OUT))

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the lane's communicator; every rank calls this."""
        wait(self._sent)
        self._layers = {}
        self._window.close()
        self.comm.Free()


def _index(rows: np.ndarray, device: torch.device) -> slice | Tensor:
    """An index of ascending rows: a slice where they follow one another."""
    if len(rows) == 0 or rows[-1] - rows[0] == len(rows) - 1:
        first = int(rows[0]) if len(rows) else 0
        return slice(first, first + len(rows))
    return torch.from_numpy(rows).to(device)


def _gather(blocks: Sequence[Tensor], rows: slice | Tensor, out: Tensor) -> None:
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
    """A communicator of `ranks` of comm, in this order; only they call this."""
    group = comm.group.Incl(list(ranks))
    try:
        return comm.Create_group(group)
    finally:
        group.Free()


def lane_communicators(
    comm: MPI.Intracomm, s_ranks: Sequence[int], r_ranks: Sequence[int], lanes: Sequence[int]
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
