"""Links over MPI's nonblocking collectives: plans by Ibcast, layers by Ineighbor_alltoallv.

A layer takes one call there and one back, on a distributed graph of the lane.

All ranks of a lane take part in a collective. So the plan says whether a step goes by collectives: it does not if some
R-rank has no rows, which would wake up in every layer for nothing. Such a step goes by messages, as in `mpi.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.base import LayerShape
from hpcdecode.exchange.memory import LaneSpec, Message, laid_out
from hpcdecode.exchange.mpi import MpiRLink, MpiSLink, Outgoing
from hpcdecode.exchange.partition import Partition
from hpcdecode.mpi.wait import Waitable, wait
from hpcdecode.schedule.plan import Plan, length_of

_FIRST = 256  # int32 of a plan that are broadcast at once; the rest of a longer one follows
_TRIAL_STEPS = 8  # each way
_SLOWER = 1.03  # times that collectives may take as long as messages
_NOTHING = np.empty(0, np.uint8)
logger = logging.getLogger(__name__)


class Trial:
    """Times both ways over the first steps of a lane, in turn, and keeps collectives unless they are slower.

    Args:
        lane: index of the lane, of which the first tells the user.
    """

    def __init__(self, lane: int):
        self.lane, self.collective = lane, True
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # by row and layer
        self._settled = False

    def add(self, seconds: float) -> None:
        """Take note of a step's seconds by row and layer; choose the way of the next one."""
        if self._settled:
            return
        self._seconds[self.collective].append(seconds)
        self.collective = not self.collective
        if min(map(len, self._seconds.values())) >= _TRIAL_STEPS:
            ratio = median(self._seconds[True]) / max(median(self._seconds[False]), 1e-12)
            self.collective, self._settled = ratio <= _SLOWER, True
            if self.lane == 0:
                way = "collectives" if self.collective else "messages"
                logger.info(f"exchange: {way}; collectives take {ratio:.2f} times as long as messages")


class _Stretches:
    """Memory for all peers of a rank side by side, in their order, as a collective takes it."""

    def __init__(self, dtype: torch.dtype):
        self._memory = torch.empty(0, dtype=dtype)

    def take(self, sizes: Sequence[int]) -> tuple[list[Tensor], list[object]]:
        """Return a stretch of so many elements for each peer, and what MPI takes for all of them."""
        total = sum(sizes)
        if total > len(self._memory):
            self._memory = torch.empty(total + total // 4, dtype=self._memory.dtype)
        whole = self._memory[:total]
        return list(whole.split(list(sizes))), _specification(whole, sizes)


def _specification(whole: Tensor, sizes: Sequence[int]) -> list[object]:
    counts = np.array(sizes, np.int64) * whole.element_size()
    starts = np.cumsum(counts) - counts
    return [whole.view(torch.uint8).numpy(), (counts.astype(np.intc), starts.astype(np.intc)), MPI.BYTE]


def _none(peers: int) -> list[object]:
    zeros = np.zeros(peers, np.intc)
    return [_NOTHING, (zeros, zeros), MPI.BYTE]


def graph_of(comm: MPI.Intracomm) -> MPI.Distgraphcomm:
    """Return the distributed graph of a lane: edges both ways between its S-rank and each R-rank.

    Open MPI 5.0 fails on a rank without edges of one direction (issue 14452).
    """
    peers = [0] if comm.rank else list(range(1, comm.size))
    return comm.Create_dist_graph_adjacent(peers, peers)


class CollectiveSLink(MpiSLink):
    """The S-rank's end of a lane.

    Args:
        comm: of the lane.
        spec: as on the R-ranks.
        trial: chooses the way of each step; None takes collectives.
    """

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec, trial: Trial | None = None):
        super().__init__(comm, spec)
        self.graph = self._graph = graph_of(comm)
        self._trial = trial
        self._there, self._back = _Stretches(spec.dtype), _Stretches(spec.dtype)
        self._buffers: dict[LayerShape, tuple[list[object], list[object]]] = {}
        self._none = _none(comm.size - 1)
        self._collective = False
        self._began = self._seconds = 0.0
        self._rows = 0

    def send_plan(self, plan: Plan) -> None:
        """Broadcast the plan of the lane's next step, which says how its layers go."""
        if self._trial and self._rows:
            self._trial.add(self._seconds / self._rows)
        self._seconds, self._rows = 0.0, 0
        self._collective = all_have_rows(plan, self.spec.partition) and (self._trial is None or self._trial.collective)
        length = self._share_out(dataclasses.replace(plan, collective=self._collective))
        self._buffers = {}
        cuts = [self._plan[:_FIRST], *([self._plan[_FIRST:length]] if length > _FIRST else [])]
        self._plans.requests += [self.comm.Ibcast([cut, MPI.INT32_T], 0) for cut in cuts]

    def send_qkv(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """Pack what all R-ranks get, and send it by one call."""
        self._began = perf_counter()
        if not self._collective:
            super().send_qkv(layer, q, k, v, o)
            return
        self.pack(layer, q, k, v, o)
        there, back = self._buffers[self.spec.shapes[layer]]
        # In this order on all ranks: MPI matches the collectives of a communicator by it.
        self._sent.requests.append(self._graph.Ineighbor_alltoallv(there, self._none))
        self._answers.requests.append(self._graph.Ineighbor_alltoallv(self._none, back))

    def recv_output(self) -> None:
        """Unpack the answers into o."""
        if self._trial:
            self._seconds += perf_counter() - self._began
            self._rows += len(self._target)
        super().recv_output()

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicators; every rank calls this."""
        wait(self._plans)
        self._graph.Free()
        super().close()

    def _outgoing(self, shape: LayerShape, device: torch.device) -> list[Outgoing]:
        """Return the messages of a layer of `shape`; those of a collective lie side by side."""
        if not self._collective:
            return super()._outgoing(shape, device)
        if shape not in self._by_shape:
            partition = self.spec.partition
            own, pieces = partition.shape(shape), [share.pieces[0] for share in self._shares]
            outward, there = self._there.take([piece.elements(own) for piece in pieces])
            inward, back = self._back.take([len(piece.decode_rows) * own.out_columns for piece in pieces])
            self._buffers[shape] = there, back
            messages = map(laid_out, pieces, [own] * len(pieces), outward, inward)
            columns = [partition.columns(shape, rank) if partition.by_head else None for rank in range(len(pieces))]
            self._by_shape[shape] = [Outgoing(rank + 1, m, columns[rank], device) for rank, m in enumerate(messages)]
        return self._by_shape[shape]


class CollectiveRLink(MpiRLink):
    """An R-rank's end of a lane."""

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec, first_slot: int = 0):
        super().__init__(comm, spec, first_slot)
        self.graph = self._graph = graph_of(comm)
        self._there, self._back = _Stretches(spec.dtype), _Stretches(spec.dtype)
        self._none = _none(1)
        self._collective = False

    def recv_plan(self) -> Waitable:
        """Return a request that is complete once a plan has come."""
        return _PlanArrival(self.comm, self._plan)

    def take_plan(self) -> Plan:
        """Return the plan that has come."""
        plan = super().take_plan()
        self._collective = plan.collective
        return plan

    def recv_qkv(self, layer: int) -> Iterator[tuple[MPI.Request, Message]]:
        """Yield a layer's messages, each with its request; once that is complete call `take_qkv`, then read it."""
        if not self._collective:
            yield from super().recv_qkv(layer)
            return
        wait(self._sent)
        shape, piece = self.shapes[layer], self.share.pieces[0]
        (outward,), there = self._there.take([piece.elements(shape)])
        (inward,), self._answer = self._back.take([len(piece.decode_rows) * shape.out_columns])
        yield self._graph.Ineighbor_alltoallv(self._none, there), laid_out(piece, shape, outward, inward)

    def send_output(self, message: Message) -> None:
        """Send the output of a piece back."""
        if self._collective:
            self._sent.requests.append(self._graph.Ineighbor_alltoallv(self._answer, self._none))
        else:
            super().send_output(message)

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicators; every rank calls this."""
        wait(self._sent)
        self._graph.Free()
        super().close()


class _PlanArrival:
    """Is done once a whole plan has been broadcast."""

    def __init__(self, comm: MPI.Intracomm, plan: NDArray[np.int32]):
        self._comm, self._plan, self._first = comm, plan, True
        self._request = comm.Ibcast([plan[:_FIRST], MPI.INT32_T], 0)

    def Test(self) -> bool:
        if not self._request.Test():
            return False
        if self._first and (length := length_of(self._plan)) > _FIRST:
            self._request = self._comm.Ibcast([self._plan[_FIRST:length], MPI.INT32_T], 0)
            self._first = False
            return self._request.Test()
        return True


def all_have_rows(plan: Plan, partition: Partition) -> bool:
    """Return whether a step has rows for every R-rank of a lane."""
    named = {partition.named(rank) for rank in range(partition.parts)}
    return named <= {*plan.decode[:, 0].tolist(), *plan.prefill[:, 0].tolist()}
