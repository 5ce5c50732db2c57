"""The exchange of a layer in plain MPI, in several ways: the same bytes from the S-rank to every R-rank and back.

Rank 0 of the communicator is the S-rank. It copies what it sends into its buffers, and what it gets out of them, each
in one stretch. Beside that there is nothing around the calls but the wait of the links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcdecode.mpi.wait import wait

Round = Callable[[], None]
Bytes = NDArray[np.uint8]
Work = Callable[[Bytes, Bytes], Callable[[], object]]  # of what has come and what goes back: an R-rank's work
Specification = tuple[Bytes, tuple[NDArray[np.intc], NDArray[np.intc]], MPI.Datatype]  # data, (counts, starts), type


class Ends:
    """Buffers of one rank; on the S-rank for all R-ranks. Leaving the context frees the persistent requests.

    Args:
        comm: The S-rank and its R-ranks.
        there: Bytes to each R-rank.
        back: Bytes from each R-rank.
        work: Returns what an R-rank does with its buffers.

    Attributes:
        persistent: Requests to free.
        peers: The ranks at the other end.
        there, back: The buffers.
        counts: Bytes of every peer, there and back.
        serve: Does an R-rank's work.
    """

    def __init__(self, comm: MPI.Intracomm, there: int, back: int, work: Work):
        self.persistent: list[MPI.Request] = []
        self.comm, self.is_s = comm, comm.rank == 0
        self.peers = list(range(1, comm.size)) if self.is_s else [0]
        self.there = np.ones(there * len(self.peers), np.uint8)
        self.back = np.ones(back * len(self.peers), np.uint8)
        self.made, self.taken = np.ones_like(self.there), np.empty_like(self.back)
        self.counts = [there] * len(self.peers), [back] * len(self.peers)
        self.serve = work(self.there, self.back)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for request in self.persistent:
            request.Free()

    def pack(self) -> None:
        """Copy what the S-rank sends into its buffer."""
        self.there[:] = self.made

    def take(self) -> None:
        """Copy what the S-rank got out of its buffer."""
        self.taken[:] = self.back


def messages(ends: Ends) -> Round:
    """Exchange by Isend and Irecv."""
    comm, peers = ends.comm, ends.peers
    there, back = (np.split(data, len(peers)) for data in (ends.there, ends.back))

    def s_round() -> None:
        ends.pack()
        requests = [comm.Irecv([part, MPI.BYTE], peer) for peer, part in zip(peers, back, strict=True)]
        requests += [comm.Isend([part, MPI.BYTE], peer) for peer, part in zip(peers, there, strict=True)]
        for request in requests:
            wait(request)
        ends.take()

    def r_round() -> None:
        wait(comm.Irecv([ends.there, MPI.BYTE], 0))
        ends.serve()
        wait(comm.Isend([ends.back, MPI.BYTE], 0))

    return s_round if ends.is_s else r_round


def persistent_messages(ends: Ends) -> Round:
    """Exchange by Send_init and Recv_init."""
    comm, peers = ends.comm, ends.peers
    there, back = (np.split(data, len(peers)) for data in (ends.there, ends.back))
    receiving, sending = (back, there) if ends.is_s else (there, back)
    receives = [comm.Recv_init([part, MPI.BYTE], peer) for peer, part in zip(peers, receiving, strict=True)]
    sends = [comm.Send_init([part, MPI.BYTE], peer) for peer, part in zip(peers, sending, strict=True)]
    ends.persistent += [*receives, *sends]
    return _started(ends, receives, sends)


def neighbours(ends: Ends) -> Round:
    """Exchange by Ineighbor_alltoallv on a distributed graph."""
    comm = ends.comm.Create_dist_graph_adjacent(ends.peers, ends.peers)
    ways = _specifications(ends)
    outward, inward = ways.outward, ways.inward
    return _collective(
        ends,
        lambda: comm.Ineighbor_alltoallv(outward.send, outward.receive),
        lambda: comm.Ineighbor_alltoallv(inward.send, inward.receive),
    )


def persistent_neighbours(ends: Ends) -> Round:
    """Exchange by Neighbor_alltoallv_init on a distributed graph (MPI 4)."""
    comm = ends.comm.Create_dist_graph_adjacent(ends.peers, ends.peers)
    outward, inward = (comm.Neighbor_alltoallv_init(way.send, way.receive) for way in _specifications(ends))
    ends.persistent += [outward, inward]
    return _collective(ends, lambda: _start(outward), lambda: _start(inward))


def all_to_all(ends: Ends) -> Round:
    """Exchange by Ialltoallv."""
    none = [0] * (ends.comm.size - len(ends.peers))
    ways = _specifications(ends, lambda counts: none + counts if ends.is_s else counts + none)
    outward, inward = ways.outward, ways.inward
    return _collective(
        ends,
        lambda: ends.comm.Ialltoallv(outward.send, outward.receive),
        lambda: ends.comm.Ialltoallv(inward.send, inward.receive),
    )


WAYS = (messages, persistent_messages, neighbours, persistent_neighbours, all_to_all)


def _start(request: MPI.Prequest) -> MPI.Request:
    request.Start()
    return request


def _started(ends: Ends, receives: list[MPI.Prequest], sends: list[MPI.Prequest]) -> Round:
    """Return a round of persistent messages."""

    def s_round() -> None:
        ends.pack()
        MPI.Prequest.Startall([*receives, *sends])
        for request in (*receives, *sends):
            wait(request)
        ends.take()

    def r_round() -> None:
        receives[0].Start()
        wait(receives[0])
        ends.serve()
        sends[0].Start()
        wait(sends[0])

    return s_round if ends.is_s else r_round


def _collective(ends: Ends, outward: Callable[[], MPI.Request], inward: Callable[[], MPI.Request]) -> Round:
    """Return a round of one collective there and one back."""

    def s_round() -> None:
        ends.pack()
        for request in [outward(), inward()]:
            wait(request)
        ends.take()

    def r_round() -> None:
        wait(outward())
        ends.serve()
        wait(inward())

    return s_round if ends.is_s else r_round


class _Transfer(NamedTuple):
    """What a collective sends and receives."""

    send: Specification
    receive: Specification


class _Ways(NamedTuple):
    """The way to the R-ranks, and the way back."""

    outward: _Transfer
    inward: _Transfer


def _specifications(ends: Ends, spread: Callable[[list[int]], list[int]] = list) -> _Ways:
    """Return what the collectives take; `spread` puts the counts of the peers among those of all ranks."""
    none = [0] * len(ends.peers)
    there, back = ends.counts
    full_there, full_back = _spec(ends.there, spread(there)), _spec(ends.back, spread(back))
    empty = _spec(np.empty(0, np.uint8), spread(none))
    if ends.is_s:
        return _Ways(_Transfer(full_there, empty), _Transfer(empty, full_back))
    return _Ways(_Transfer(empty, full_there), _Transfer(full_back, empty))


def _spec(data: Bytes, counts: Sequence[int]) -> Specification:
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return data, (np.asarray(counts, np.intc), starts.astype(np.intc)), MPI.BYTE
