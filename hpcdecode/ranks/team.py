"""The ranks of a job as a team: what each of them is, and which are left after a loss."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hpcdecode.errors import RankLost
from hpcdecode.mpi.collectives import broadcast, gather_all
from hpcdecode.mpi.gpu import takes_cuda_memory
from hpcdecode.mpi.wait import Backoff
from hpcdecode.ranks.launch import end_all
from hpcdecode.ranks.layout import Group, assign_roles, deal_pools, dissolve_groups, groups_of
from hpcdecode.ranks.roles import Rank, assign_cores, assign_devices, sharing_cores
from hpcdecode.ranks.wishes import Wishes
from hpcdecode.system.cores import arranged, machine, nodes_of
from hpcdecode.system.gpus import VisibleGpus, use_gpu, visible_gpus
from hpcdecode.system.memory import available_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
logger = logging.getLogger(__name__)
_WAIT_FOR_END_SECONDS = 10.0


class WeightFacts(NamedTuple):
    """What a rank knows of the model's weights before it loads them.

    Attributes:
        bytes: Of memory that they take; 0 if they are not known here.
        shared: Whether ranks of a NUMA node would have one copy of them.
    """

    bytes: int = 0
    shared: bool = False


class Team:
    """The ranks of a job, and this rank's place among them.

    Attributes:
        comm: Communicator of the ranks; None if there is only one.
        ranks: All ranks, in the order of `comm`.
        place: Position of this rank in `ranks`.
        me: This rank.
        s_ranks: Positions of the ranks with role S.
        r_ranks: Positions of the ranks with role R.
        groups: The S-ranks and their pools.
        layout: What was chosen, and why, as a line for the user.
    """

    def __init__(self, comm: MPI.Intracomm | None, ranks: list[Rank], layout: str = ""):
        self.comm, self.ranks, self.layout = comm, ranks, layout
        self.place = comm.rank if comm else 0
        self.me = ranks[self.place]
        self.s_ranks = [place for place, r in enumerate(ranks) if r.has_s]
        self.r_ranks = [place for place, r in enumerate(ranks) if r.has_r]
        self.groups = groups_of(ranks)

    @property
    def own(self) -> list[int]:
        """Indices of this rank's groups: one for an S-rank, those that it serves for an R-rank."""
        mine = self.place
        if self.me.has_s:
            return [i for i, g in enumerate(self.groups) if mine in g.members]
        return [i for i, g in enumerate(self.groups) if any(mine in pool for pool in g.pools)]

    @property
    def group(self) -> Group:
        """The group of this rank; of an R-rank the first, as all that it serves have the same pool."""
        return self.groups[self.own[0]]

    @property
    def pool(self) -> list[int]:
        """Positions of the R-ranks over which the attention of this rank, or of the members it serves, is spread.

        There are none for a rank without a role.
        """
        return self.group.pool_of(self.place) if self.own else []

    @property
    def homes(self) -> list[int]:
        """Positions of the first members of all groups."""
        return [group.home for group in self.groups]

    @property
    def lead(self) -> bool:
        """Whether this is the first S-rank, which reads the prompts and writes the results."""
        return self.place == self.s_ranks[0]

    def pin(self) -> None:
        """Bind this process to its cores, if it has cores of its own."""
        if self.me.pinned:
            os.sched_setaffinity(0, self.me.cpus)

    def occupy(self) -> None:
        """Have the calling thread compute on this rank's threads and GPU. It comes before all that touches the GPU."""
        import torch

        use_gpu(self.me.gpu)
        torch.set_num_threads(self.me.threads)

    def broadcast(self, value: T | None, kind: type[T]) -> T:
        """Return the lead's `value` on every rank, as msgspec type `kind`; the others may pass None."""
        return broadcast(self.comm, value, kind, self.s_ranks[0])

    def gather_all(self, value: T, kind: type[T]) -> list[T]:
        """Return the values of all ranks, in the order of `ranks`, on every rank."""
        return gather_all(self.comm, value, kind)


def assemble(
    comm: MPI.Intracomm | None,
    wishes: Wishes | None = None,
    device: str | None = "cpu",
    r_device: str = "cpu",
    weights: WeightFacts | None = None,
    advise: Callable[[Team], tuple[Wishes, str]] | None = None,
) -> Team:
    """Give every rank its role, devices and cores. Collective over `comm`.

    Args:
        comm: The world; None for a single process.
        wishes: What is asked of the layout; None for one S-rank.
        device: Device of S-ranks, `cpu` or `cuda`; None chooses.
        r_device: Device of R-ranks, `cpu`, `cuda` or `auto`.
        weights: What is known on this rank of the model's weights, if anything.
        advise: Returns other wishes, and what follows the layout's line, for the team as it would be; collective.

    Raises:
        UserError: If the world does not have what is asked for.
    """
    cpus, known = arranged(os.sched_getaffinity(0)), weights or WeightFacts()
    seen = VisibleGpus([]) if device == r_device == "cpu" else visible_gpus()
    me = Rank(
        rank=comm.rank if comm else 0,
        host=socket.gethostname(),
        machine=machine(),
        cpus=cpus,
        nodes=nodes_of(cpus),
        numa=_numa(cpus),
        gpus=[gpu.name for gpu in seen.gpus],
        gpu_nodes=[gpu.node for gpu in seen.gpus],
        gpu_trouble=seen.trouble,
        memory=available_bytes(),
        weights=known.bytes,
        shares_weights=known.shared,
        gpu_mpi=comm is not None and takes_cuda_memory(),
    )
    ranks = gather_all(comm, me, Rank)
    wishes, said = wishes or Wishes(s_ranks=1), ""
    if advise is not None:
        trial = [copy(rank) for rank in ranks]
        wishes, said = advise(Team(comm, trial, assign_roles(trial, wishes)))
    layout = assign_roles(ranks, wishes) + said
    assign_devices(ranks, device, r_device)
    assign_cores(ranks)
    team = Team(comm, ranks, layout)
    if team.lead:
        _warn_of_gpus(ranks)
    if comm is not None:
        beside = (rank for rank in ranks if rank.place == team.me.place)
        Backoff.own_cores = team.me.pinned and team.me.rank not in sharing_cores(beside)
    team.me.numa = _numa(team.me.cpus)
    return team


def _warn_of_gpus(ranks: Sequence[Rank]) -> None:
    """Warn of GPUs that their ranks cannot use, as their driver says: nobody asked for one, so cores do their work."""
    for trouble in sorted({r.gpu_trouble for r in ranks} - {""}):
        who = named(r for r in ranks if r.gpu_trouble == trouble)
        logger.warning(f"hpcdecode: GPUs are not used by {who}: {trouble}")


def _numa(cpus: Iterable[int]) -> str:
    """Return the NUMA nodes of `cpus` as text, `-` if they are not known."""
    return ",".join(map(str, sorted(set(nodes_of(cpus))))) or "-"


def survivors(team: Team) -> Team:
    """Return the remaining ranks of a team as a team with the same roles, once `ulfm.together` has told of a loss.

    A group of which a member is lost dissolves: the others of it have nothing to do any more. R-ranks are dealt out
    anew, as many as all members can have alike.

    Raises:
        RankLost: On one rank, if the lead or a member of its group is lost, or too few R-ranks remain.
    """
    from hpcdecode.mpi import ulfm

    assert team.comm is not None, "a single process has no ranks to lose"
    comm, places = ulfm.shrunk(team.comm)
    ranks, first = [team.ranks[place] for place in places], team.groups[0].members
    dissolve_groups(team.ranks, [g for g in team.groups if not set(g.members) <= set(places)], places)
    if set(first) <= set(places) and deal_pools(ranks, team.ranks[first[0]].parts):
        return Team(comm, ranks, team.layout)
    if comm.rank != (places.index(first[0]) if first[0] in places else 0):
        time.sleep(_WAIT_FOR_END_SECONDS)
        end_all(comm)
    lost = named(rank for place, rank in enumerate(team.ranks) if place not in places)
    gone = "the lead is not" if first[0] not in places else "the lead's group is not"
    raise RankLost(f"{lost} lost, and {gone if not set(first) <= set(places) else 'no R-rank is'} left")


def named(ranks: Iterable[Rank]) -> str:
    """Return the ranks as text, such as `rank 2 (R) on node17`."""
    return ", ".join(f"rank {r.rank} ({r.role}) on {r.host}" for r in ranks)
