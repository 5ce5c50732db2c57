"""Values of any size between all ranks of a communicator, waited for without using a core."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import numpy as np

from hpcdecode.mpi.wait import wait

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def broadcast(comm: MPI.Intracomm | None, value: T | None, kind: type[T], root: int = 0) -> T:
    """Return the `value` of rank `root` on every rank, as msgspec type `kind`; wait without using a core."""
    if comm is None:
        return cast(T, value)  # the only rank is the root, which passes a value
    data = msgspec.msgpack.encode(value) if comm.rank == root else b""
    length = np.array([len(data)], np.int64)
    wait(comm.Ibcast(length, root))
    wire = np.frombuffer(bytearray(data or int(length[0])), np.uint8)
    wait(comm.Ibcast(wire, root))
    return msgspec.msgpack.decode(wire.tobytes(), type=kind)


def gather_all(comm: MPI.Intracomm | None, value: T, kind: type[T]) -> list[T]:
    """Return the values of all ranks of `comm`, by rank, on every rank, as msgspec type `kind`."""
    if comm is None:
        return [value]
    own = np.frombuffer(msgspec.msgpack.encode(value), np.uint8)
    lengths = np.empty(comm.size, np.int64)
    wait(comm.Iallgather(np.array([len(own)], np.int64), lengths))
    ends = np.cumsum(lengths)
    wire = np.empty(ends[-1], np.uint8)
    wait(comm.Iallgatherv(own, [wire, lengths]))
    cut = zip(ends - lengths, ends, strict=True)
    return [msgspec.msgpack.decode(wire[start:end].tobytes(), type=kind) for start, end in cut]
