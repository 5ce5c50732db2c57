"""Links over MPI's nonblocking collectives: plans by Ibcast, layers by Ineighbor_alltoallv.

A layer takes one call there and one back, on a distributed graph of the S-rank and the R-ranks that share no memory
with it. The others get their layers there, by messages as in `mpi.py`.

All ranks of the graph take part in a collective. So the plan says whether a step goes by collectives: it does not if
one of them has no rows, which would wake up in every layer for nothing. Such a step goes by messages.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from hpcdecode.attention.shapes import MixerShape
from hpcdecode.exchange.base import Parcel
from hpcdecode.exchange.memory import LaneSpec, Message
from hpcdecode.exchange.mpi import MpiRLink, MpiSLink
from hpcdecode.exchange.outgoing import Outgoing
from hpcdecode.exchange.partition import Partition
from hpcdecode.mpi.wait import Waitable, wait
from hpcdecode.schedule.plan import Plan, length_of

_FIRST = 256  # int32 of a plan that are broadcast at once; the rest of a longer one follows
_TRIAL_STEPS = 8  # each way
SLOWER = 1.03  # times that collectives may take as long as messages
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
            self.collective, self._settled = ratio <= SLOWER, True
            if self.lane == 0:
                way = "collectives" if self.collective else "messages"
                logger.info(f"exchange: {way}; collectives take {ratio:.2f} times as long as messages")


class _Wire(NamedTuple):
    """What the two collectives of a layer carry, as MPI takes it."""

    there: list[object]
    back: list[object]


@dataclass
class _Together(Outgoing):
    """What is packed before a collective, which takes the place of messages."""

    wire: _Wire

    def parts(self) -> list[Outgoing]:
        """Return it whole."""
        return [self]


def _wire(messages: Sequence[Message]) -> _Wire:
    """Return what carries `messages`, by neighbour; they lie in one stretch of memory, in any order."""
    there = _specification([(m.rows, m.rows.numel() + m.prompts.numel()) for m in messages])
    return _Wire(there, _specification([(m.out, m.out.numel()) for m in messages]))


def _specification(stretches: Sequence[tuple[Tensor, int]]) -> list[object]:
    """Return data, counts, offsets and type of stretches, each given by its begin and its number of elements."""
    begins, counts = [begin.storage_offset() for begin, _ in stretches], [elements for _, elements in stretches]
    memory, first = stretches[0][0], min(begins)
    data = memory.as_strided((sum(counts),), (1,), first).view(torch.uint8).numpy()
    size = memory.element_size()
    in_bytes = [(np.array(x, np.int64) * size).astype(np.intc) for x in (counts, [b - first for b in begins])]
    return [data, tuple(in_bytes), MPI.BYTE]


def _none(peers: int) -> list[object]:
    zeros = np.zeros(peers, np.intc)
    return [np.empty(0, np.uint8), (zeros, zeros), MPI.BYTE]


def graph_of(comm: MPI.Intracomm, takes_part: bool) -> MPI.Distgraphcomm | None:
    """Return a distributed graph with edges both ways between rank 0 and each other rank that takes part.

    Open MPI 5.0 fails on a rank without edges of one direction (issue 14452), so the graph has no others.

    Args:
        comm: of the lane; all its ranks call this.
        takes_part: whether this rank does, if it is not rank 0.

    Returns:
        None on other ranks, and if there are none that take part.
    """
    members = MPI.Intracomm(comm.Split(0 if takes_part or comm.rank == 0 else MPI.UNDEFINED, comm.rank))
    if members == MPI.COMM_NULL:
        return None
    try:
        peers = [0] if members.rank else list(range(1, members.size))
        return members.Create_dist_graph_adjacent(peers, peers) if members.size > 1 else None
    finally:
        members.Free()


class CollectiveSLink(MpiSLink):
    """The S-rank's end of a lane. R-ranks with which it shares memory get their layers there, by messages.

    Args:
        comm: of the lane.
        spec: as on the R-ranks.
        trial: chooses the way of each step; None takes collectives.
    """

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec, trial: Trial | None = None):
        super().__init__(comm, spec)
        self.graph = graph_of(comm, False)
        self._neighbours = [rank for rank, memory in enumerate(self._memory.ranks) if not memory.is_shared]
        self._trial = trial
        self._none = _none(len(self._neighbours))
        self._collective = False
        self._began = self._seconds = 0.0
        self._rows = self._tokens = 0

    def send_plan(self, plan: Plan) -> None:
        """Broadcast the plan of the lane's next step, which says how its layers go."""
        if self._trial and self._rows:
            self._trial.add(self._seconds / self._rows)
        self._seconds, self._rows = 0.0, 0
        self._tokens = plan.decode_tokens + plan.prefill_tokens
        possible = self.graph is not None and all_have_rows(plan, self.spec.partition, self._neighbours)
        self._collective = possible and (self._trial is None or self._trial.collective)
        length = self._share_out(dataclasses.replace(plan, collective=self._collective))
        cuts = [self._plan[:_FIRST], *([self._plan[_FIRST:length]] if length > _FIRST else [])]
        self._plans.requests += [self.comm.Ibcast([cut, MPI.INT32_T], 0) for cut in cuts]

    def begin(self, layer: int) -> None:
        """Take up a layer."""
        super().begin(layer)
        self._began = perf_counter()

    def take_answers(self) -> None:
        """Take note that all answers have come."""
        if self._trial:
            self._seconds += perf_counter() - self._began
            self._rows += self._tokens
        super().take_answers()

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicators; every rank calls this."""
        wait(self._plans)
        wait(self._sent)
        if self.graph is not None:
            self.graph.Free()
        super().close()

    def _outgoing(self, shape: MixerShape) -> list[Outgoing]:
        """Return what is packed for a layer of `shape`; what goes by a collective comes first."""
        if not self._collective:
            return super()._outgoing(shape)
        groups = self._groups(self.spec.partition.shape(shape))
        far = [posts for posts in groups if posts[0].rank - 1 in self._neighbours]
        messages = dict(post for posts in far for post in posts)
        wire = _wire([messages[rank + 1] for rank in self._neighbours])
        together = _Together(far, (), shape, self.spec.partition, wire)
        near = [posts for posts in groups if posts[0].rank - 1 not in self._neighbours]
        return [together, *(Outgoing([posts], posts, shape, self.spec.partition) for posts in near)]

    def exchange(self, parcel: Parcel) -> None:
        """Send a parcel, which is packed, and expect the answers to it.

        Collectives come in this order on all ranks: MPI matches those of a communicator by it.
        """
        self.send(parcel)
        self.expect(parcel)

    def send(self, parcel: Parcel) -> None:
        """Send a parcel, which is packed."""
        if isinstance(parcel, _Together) and self.graph is not None:
            self._sent.requests.append(self.graph.Ineighbor_alltoallv(parcel.wire.there, self._none))
        else:
            super().send(parcel)

    def expect(self, parcel: Parcel) -> None:
        """Expect the answers to a parcel."""
        if isinstance(parcel, _Together) and self.graph is not None:
            self._answers.requests.append(self.graph.Ineighbor_alltoallv(self._none, parcel.wire.back))
        else:
            super().expect(parcel)


class CollectiveRLink(MpiRLink):
    """An R-rank's end of a lane."""

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec, first_slot: int = 0):
        super().__init__(comm, spec, first_slot)
        self.graph = graph_of(comm, not self._memory.ranks[0].is_shared)
        self._none, self._collective = _none(1), False
        self._wires: dict[int, _Wire] = {}  # by kind of layer

    def recv_plan(self) -> Waitable:
        """Return a request that is complete once a plan has come."""
        return _PlanArrival(self.comm, self._plan)

    def take_plan(self) -> Plan:
        """Return the plan that has come."""
        plan = super().take_plan()
        self._collective, self._wires = plan.collective, {}
        return plan

    def recv_rows(self, layer: int) -> Iterator[tuple[MPI.Request, Message]]:
        """Yield a layer's messages, each with its request; to be read once that is complete."""
        if not self._collective or self.graph is None:
            yield from super().recv_rows(layer)
            return
        messages, kind = self.messages(layer), self._kinds[layer]
        wire = self._wires[kind] if kind in self._wires else self._wires.setdefault(kind, _wire(messages))
        wait(self._sent)
        self._answer = wire.back
        yield self.graph.Ineighbor_alltoallv(self._none, wire.there), messages[0]

    def send_output(self, message: Message) -> None:
        """Send the output of a piece back."""
        if self._collective and self.graph is not None:
            self._sent.requests.append(self.graph.Ineighbor_alltoallv(self._answer, self._none))
        else:
            super().send_output(message)

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicators; every rank calls this."""
        wait(self._sent)
        if self.graph is not None:
            self.graph.Free()
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


def all_have_rows(plan: Plan, partition: Partition, ranks: Iterable[int]) -> bool:
    """Return whether a step has rows for each of `ranks`, R-ranks of a lane."""
    named = set(map(partition.named, ranks))
    return named <= {*plan.decode[:, 0].tolist(), *plan.prefill[:, 0].tolist()}
