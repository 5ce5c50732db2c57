"""Communicators of some ranks of a world."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI


def subset(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of `ranks` of comm, in this order; only they call this."""
    group = comm.group.Incl(list(ranks))
    try:
        return comm.Create_group(group)
    finally:
        group.Free()


def communicators(comm: MPI.Intracomm, groups: Sequence[Sequence[int]]) -> list[MPI.Intracomm]:
    """Return the communicators of this rank, one for every group of ranks that it is in. Collective over `comm`.

    Groups without a rank in common are made together. All of `comm` take part, as ULFM needs: Open MPI's
    `MPI_Comm_create_group` waits for ever for a member that is lost.

    Args:
        comm: The ranks.
        groups: Ranks of each group, in the order that they have in its communicator; the same on all ranks.
    """
    made: dict[int, MPI.Intracomm] = {}
    left = [number for number, ranks in enumerate(groups) if ranks]
    while left:
        chosen, taken = [], set[int]()
        for number in left:
            if taken.isdisjoint(groups[number]):
                chosen.append(number)
                taken.update(groups[number])
        own = next((number for number in chosen if comm.rank in groups[number]), None)
        created = _created(comm, [] if own is None else groups[own])
        if own is not None:
            made[own] = created
        left = [number for number in left if number not in chosen]
    return [made[number] for number in sorted(made)]


def _created(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Return the communicator of `ranks`, which others of `comm` create with ranks of their own, or with none."""
    group = comm.group.Incl(list(ranks))
    try:
        return MPI.Intracomm(comm.Create(group))
    finally:
        group.Free()
