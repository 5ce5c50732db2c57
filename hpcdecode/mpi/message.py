"""Single messages between two ranks: a msgspec struct, or a number of its kind, of any size."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TypeVar

import msgspec
import numpy as np
from mpi4py import MPI

from hpcdecode.mpi.wait import wait

T = TypeVar("T")
_CLOCK = 4  # tag
_ROUNDS = 10


def send(comm: MPI.Intracomm, target: int, tag: int, message: object) -> None:
    """Returns when `message` is on its way; a large one may wait for its receiver."""
    wait(post(comm, target, tag, message))


def post(comm: MPI.Intracomm, target: int, tag: int, message: object) -> MPI.Request:
    """As `send`, for one who must not wait: the message is on its way when the request is complete."""
    return comm.Isend([msgspec.msgpack.encode(message), MPI.BYTE], target, tag)


def receive(comm: MPI.Intracomm, source: int, tag: int, kind: type[T]) -> T:
    """The next message of this tag, as msgspec type `kind`; waits without burning a core."""
    arrival = _Arrival(comm, source, tag)
    wait(arrival)
    wire = np.empty(arrival.status.Get_count(MPI.BYTE), np.uint8)
    wait(comm.Irecv([wire, MPI.BYTE], source, tag))
    return msgspec.msgpack.decode(wire.tobytes(), type=kind)


class _Arrival:
    def __init__(self, comm: MPI.Intracomm, source: int, tag: int):
        self.comm, self.source, self.tag, self.status = comm, source, tag, MPI.Status()

    def Test(self) -> bool:
        return self.comm.Iprobe(self.source, self.tag, self.status)


def clock_offset(comm: MPI.Intracomm) -> int:
    """Nanoseconds to add to this rank's `perf_counter_ns` for that of rank 0; every rank calls this.

    Good to half of the fastest round trip: microseconds on a host, tens of them between hosts.
    """
    if comm.rank > 0:
        for _ in range(_ROUNDS):
            receive(comm, 0, _CLOCK, int)
            send(comm, 0, _CLOCK, perf_counter_ns())
        return receive(comm, 0, _CLOCK, int)
    for other in range(1, comm.size):
        send(comm, other, _CLOCK, min(_round(comm, other) for _ in range(_ROUNDS))[1])
    return 0


def _round(comm: MPI.Intracomm, other: int) -> tuple[int, int]:
    """(round trip, offset) of one question for the time."""
    asked = perf_counter_ns()
    send(comm, other, _CLOCK, 0)
    theirs = receive(comm, other, _CLOCK, int)
    answered = perf_counter_ns()
    return answered - asked, (asked + answered) // 2 - theirs
