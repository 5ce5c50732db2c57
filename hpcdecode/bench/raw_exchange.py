"""The exchange of a layer in plain MPI, in several ways: the same bytes from the S-rank to every R-rank and back.

Rank 0 of the communicator is the S-rank. It copies what it sends into its buffers and what it gets out of them, each
in one stretch; beside that there is nothing around the calls but the wait of the links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from hpcdecode.mpi.wait import wait

Round = Callable[[], None]
Work = Callable[[np.ndarray, np.ndarray], None]  # what an R-rank does with what has come; fills what goes back


class Ends:
    """Buffers of one rank: there, back, of so many bytes to each R-rank and back; on the S-rank for all of them.

    Leaving frees the persistent requests.
    """

    def __init__(self, comm: MPI.Intracomm, there: int, back: int, work: Work):
        self.persistent: list[MPI.Request] = []
        self.comm, self.is_s, self.work = comm, comm.rank == 0, work
        self.peers = list(range(1, comm.size)) if self.is_s else [0]
        self.there = np.ones(there * len(self.peers), np.uint8)
        self.back = np.ones(back * len(self.peers), np.uint8)
        self.made, self.taken = np.ones_like(self.there), np.empty_like(self.back)
        self.counts = [there] * len(self.peers), [back] * len(self.peers)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_) -> None:
        for request in self.persistent:
            request.Free()

    def pack(self) -> None:
        self.there[:] = self.made

    def take(self) -> None:
        self.taken[:] = self.back

    def serve(self) -> None:
        self.work(self.there, self.back)


def messages(ends: Ends) -> Round:
    """Isend and Irecv."""
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
    """Send_init and Recv_init."""
    comm, peers = ends.comm, ends.peers
    there, back = (np.split(data, len(peers)) for data in (ends.there, ends.back))
    receiving, sending = (back, there) if ends.is_s else (there, back)
    receives = [comm.Recv_init([part, MPI.BYTE], peer) for peer, part in zip(peers, receiving, strict=True)]
    sends = [comm.Send_init([part, MPI.BYTE], peer) for peer, part in zip(peers, sending, strict=True)]
    ends.persistent += [*receives, *sends]
    return _started(ends, receives, sends)


def neighbours(ends: Ends) -> Round:
    """Ineighbor_alltoallv on a distributed graph."""
    comm = ends.comm.Create_dist_graph_adjacent(ends.peers, ends.peers)
    outward, inward = _specifications(ends)
    return _collective(ends, lambda: comm.Ineighbor_alltoallv(*outward), lambda: comm.Ineighbor_alltoallv(*inward))


def persistent_neighbours(ends: Ends) -> Round:
    """Neighbor_alltoallv_init on a distributed graph (MPI 4)."""
    comm = ends.comm.Create_dist_graph_adjacent(ends.peers, ends.peers)
    requests = [comm.Neighbor_alltoallv_init(*way) for way in _specifications(ends)]
    ends.persistent += requests
    return _collective(ends, *(lambda request=request: request.Start() or request for request in requests))


def all_to_all(ends: Ends) -> Round:
    """Ialltoallv."""
    none = [0] * (ends.comm.size - len(ends.peers))
    outward, inward = _specifications(ends, lambda counts: none + counts if ends.is_s else counts + none)
    return _collective(ends, lambda: ends.comm.Ialltoallv(*outward), lambda: ends.comm.Ialltoallv(*inward))


WAYS = (messages, persistent_messages, neighbours, persistent_neighbours, all_to_all)


def _started(ends: Ends, receives: list, sends: list) -> Round:
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


def _specifications(
    ends: Ends, spread: Callable[[list[int]], list[int]] = list
) -> tuple[Sequence[list], Sequence[list]]:
    """(send, receive) of the way to the R-ranks, and of the way back."""
    none = [0] * len(ends.peers)
    there, back = ends.counts
    full_there, full_back = _spec(ends.there, spread(there)), _spec(ends.back, spread(back))
    empty = _spec(np.empty(0, np.uint8), spread(none))
    return ((full_there, empty), (empty, full_back)) if ends.is_s else ((empty, full_there), (full_back, empty))


def _spec(data: np.ndarray, counts: list[int]) -> list:
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return [data, (np.asarray(counts, np.intc), starts.astype(np.intc)), MPI.BYTE]
