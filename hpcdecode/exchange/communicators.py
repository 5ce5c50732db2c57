"""Communicators of some ranks of a world."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from mpi4py import MPI


def subset(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of `ranks` of comm, in this order; only they call this."""
    group = comm.group.Incl(list(ranks))
    try:
        return comm.Create_group(group)
    finally:
        group.Free()


def lane_communicators(
    comm: MPI.Intracomm, groups: Sequence[Sequence[int]], lanes: Sequence[int]
) -> list[MPI.Intracomm]:
    """Return the communicator of every lane of this rank, by group and lane.

    Args:
        comm: of all ranks.
        groups: ranks in it of each group, its S-rank first.
        lanes: number of lanes of each group.
    """
    of_lanes = chain.from_iterable([number] * count for number, count in enumerate(lanes))
    return [subset(comm, groups[number]) for number in of_lanes if comm.rank in groups[number]]
