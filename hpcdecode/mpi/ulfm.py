"""User-level failure mitigation (ULFM) of MPI: the other ranks see the loss of a rank as an error and go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from mpi4py import MPI

T = TypeVar("T")
_ENABLED = "OMPI_MCA_mpi_ft_enable"  # mpiexec --with-ft sets it for the ranks
_TRUE = ("1", "true", "yes", "enabled")


def problem() -> str | None:
    """Return why this world cannot survive the loss of a rank, or None if it can."""
    library = MPI.Get_library_version().split(",")[0].split("\n")[0]
    if not library.startswith("Open MPI") or not hasattr(MPI.Comm, "Shrink"):
        return f"got {' '.join(library.split())}"
    return None if os.environ.get(_ENABLED, "").lower() in _TRUE else f"got {library} without --with-ft ulfm"


def lost(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of `comm` that are known to be lost, and acknowledge them.

    Receives from any source raise no error for them afterwards.
    """
    if problem():
        return []
    comm.Ack_failed()
    return _within(comm.Get_failed(), comm)


class Agreement(NamedTuple, Generic[T]):
    """What ranks agree on after an action; the same on all of those that remain, but for the result.

    Attributes:
        result: What the action returned, or None if it was not done on every rank.
        whole: Whether no rank is lost.
    """

    result: T | None
    whole: bool


def together(comm: MPI.Intracomm, comms: Iterable[MPI.Intracomm], action: Callable[[], T | None]) -> Agreement[T]:
    """Call `action` and agree on its outcome. Collective over `comm`. A loss that stops it revokes `comm` and `comms`.

    Args:
        comm: Communicator whose ranks must agree.
        comms: Other communicators that `action` may wait in.
        action: Called once on this rank; returns None if it could not be done here.
    """
    result = None
    try:
        result = action()
    except MPI.Exception:
        known = [c for c in (*comms, comm) if c != MPI.COMM_NULL]
        if not lost(comm) and not any(c.Is_revoked() for c in known):
            raise
        for each in known:
            each.Revoke()
    done, whole = agreed(comm, done=result is not None)
    return Agreement(result if done else None, whole)


def agreed(comm: MPI.Intracomm, *, done: bool) -> tuple[bool, bool]:
    """Return whether all ranks of `comm` pass `done`, and whether none is lost; the same on all remaining ranks."""
    whole = not lost(comm)
    with suppress(MPI.Exception):  # a loss that some ranks did not know of yet
        flags = comm.Agree(int(done) | int(whole) << 1)
        return bool(flags & 1), bool(flags & 2)
    return False, False


def shrunk(comm: MPI.Intracomm) -> tuple[MPI.Intracomm, list[int]]:
    """Return a communicator of the remaining ranks, and their ranks in `comm`. All of them call it."""
    made = comm.Shrink()
    assert isinstance(made, MPI.Intracomm)
    return made, _within(made.Get_group(), comm)


def _within(group: MPI.Group, comm: MPI.Intracomm) -> list[int]:
    """Return the ranks in `comm` of a group's members, and free the group."""
    whole = comm.Get_group()
    try:
        return group.Translate_ranks(range(group.size), whole)
    finally:
        whole.Free()
        group.Free()
