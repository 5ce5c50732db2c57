"""User-level failure mitigation (ULFM) of MPI: the loss of a rank is an error at the others, which go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from mpi4py import MPI

T = TypeVar("T")
_ENABLED = "OMPI_MCA_mpi_ft_enable"  # mpiexec --with-ft sets it for the ranks
_TRUE = ("1", "true", "yes", "enabled")


def problem() -> str | None:
    """Why this world cannot outlive the loss of a rank; None if it can."""
    library = MPI.Get_library_version().split(",")[0].split("\n")[0]
    if not library.startswith("Open MPI") or not hasattr(MPI.Comm, "Shrink"):
        return f"got {' '.join(library.split())}"
    return None if os.environ.get(_ENABLED, "").lower() in _TRUE else f"got {library} without --with-ft ulfm"


def lost(comm: MPI.Intracomm) -> list[int]:
    """The ranks of comm that are known to be lost; they are no reason for errors any more where none takes part."""
    if problem():
        return []
    comm.Ack_failed()
    return _within(comm.Get_failed(), comm)


def unless_lost(comm: MPI.Intracomm, comms: Iterable[MPI.Intracomm], action: Callable[[], T]) -> T | None:
    """What `action` returns on this rank; None on all that are left of comm if one of its ranks was lost meanwhile.

    comms: those beside comm that it may wait in. Every rank of comm calls this; of a loss all are revoked.
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
    return result if agreed(comm, result is not None) else None


def agreed(comm: MPI.Intracomm, fine: bool) -> bool:
    """Whether all ranks of comm are there, and all say `fine`; the same on all that are left."""
    lost(comm)
    with suppress(MPI.Exception):  # a loss that some have not heard of yet
        return bool(comm.Agree(int(fine)))
    return False


def shrunk(comm: MPI.Intracomm) -> tuple[MPI.Intracomm, list[int]]:
    """A communicator of what is left of comm, and their ranks in comm; all of them call this."""
    made = comm.Shrink()
    return made, _within(made.Get_group(), comm)


def _within(group: MPI.Group, comm: MPI.Intracomm) -> list[int]:
    """The ranks of a group in comm; frees the group."""
    whole = comm.Get_group()
    try:
        return group.Translate_ranks(range(group.size), whole)
    finally:
        whole.Free()
        group.Free()
