"""Single messages between two ranks: values that msgspec encodes, of any size."""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter_ns
from typing import TypeVar

import msgspec
import numpy as np
from mpi4py import MPI

from hpcdecode.mpi.wait import Waitable, wait, waited

T = TypeVar("T")
_CLOCK = 4  # tag
_ROUNDS = 10


def send(comm: MPI.Intracomm, target: int, tag: int, message: object) -> None:
    """Send `message`; a large one may wait for its receiver."""
    wait(post(comm, target, tag, message))


def post(comm: MPI.Intracomm, target: int, tag: int, message: object) -> MPI.Request:
    """Begin to send `message` and return the MPI request, without waiting."""
    return comm.Isend([msgspec.msgpack.encode(message), MPI.BYTE], target, tag)


def receive(comm: MPI.Intracomm, source: int, tag: int, kind: type[T]) -> T:
    """Return the next message with `tag`, decoded as msgspec type `kind`; wait without using a core."""
    return waited(arriving(comm, source, tag, kind))


def arriving(comm: MPI.Intracomm, source: int, tag: int, kind: type[T]) -> Generator[Waitable, None, T]:
    """Yield what to wait for until the next message with `tag` is here; return it, decoded as msgspec type `kind`."""
    arrival = _Arrival(comm, source, tag)
    yield arrival
    wire = np.empty(arrival.status.Get_count(MPI.BYTE), np.uint8)
    yield comm.Irecv([wire, MPI.BYTE], source, tag)
    return msgspec.msgpack.decode(wire.tobytes(), type=kind)


class _Arrival:
    """Waits for a message to be announced, whose size `status` then tells."""

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int):
        self.comm, self.source, self.tag, self.status = comm, source, tag, MPI.Status()

    def Test(self) -> bool:
        return self.comm.Iprobe(self.source, self.tag, self.status)


def clock_offset(comm: MPI.Intracomm) -> int:
    """Return the nanoseconds to add to this rank's `perf_counter_ns` to get that of rank 0.

    Collective over `comm`. Ranks that may share one clock, as those of a host do, get 0 however busy the host is. Else
    the error is at most half of the fastest round trip: tens of microseconds between hosts.
    """
    if comm.rank > 0:
        for _ in range(_ROUNDS):
            receive(comm, 0, _CLOCK, int)
            send(comm, 0, _CLOCK, perf_counter_ns())
        return receive(comm, 0, _CLOCK, int)
    for other in range(1, comm.size):
        bounds = [_bounds(comm, other) for _ in range(_ROUNDS)]
        least, most = max(b[0] for b in bounds), min(b[1] for b in bounds)
        send(comm, other, _CLOCK, 0 if least <= 0 <= most else (least + most) // 2)
    return 0


def _bounds(comm: MPI.Intracomm, other: int) -> tuple[int, int]:
    """Return the least and the greatest clock offset that one exchange allows, in nanoseconds."""
    sent = perf_counter_ns()
    send(comm, other, _CLOCK, 0)
    theirs = receive(comm, other, _CLOCK, int)
    return sent - theirs, perf_counter_ns() - theirs
