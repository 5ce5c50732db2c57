"""The lanes of a rank, and its ends of them: in this process, or over MPI by messages or collectives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from hpcdecode.attention.base import isa
from hpcdecode.config import EngineOptions
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.group_lane import MpiGroupLane
from hpcdecode.engine.scale import Scale
from hpcdecode.engine.setup import Setup, apart, direct, partition_of
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.device import open_memory
from hpcdecode.exchange.local import LocalLink
from hpcdecode.exchange.staging import staged
from hpcdecode.ranks.team import Team
from hpcdecode.schedule.routes import Rotation
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.exchange.memory import LaneSpec
    from hpcdecode.exchange.mpi import MpiRLink, MpiSLink


class Lane(NamedTuple):
    """A lane of one of this rank's groups.

    Attributes:
        group: index of the group.
        number: in the group.
        scale: of the group.
        first_slot: of this rank's KV cache, the first that is the lane's.
    """

    group: int
    number: int
    scale: Scale
    first_slot: int


def lanes_of(team: Team, scales: Sequence[Scale]) -> list[Lane]:
    """Return the lanes of this rank, by group; its KV cache has the slots of all of them, side by side."""
    groups = [(group, number) for group in team.own for number in range(len(scales[group].lanes))]
    first_slots = accumulate((scales[group].slots for group, _ in groups), initial=0)
    return [Lane(*place, scales[place[0]], slot) for place, slot in zip(groups, first_slots, strict=False)]


def slots_of(lanes: Sequence[Lane]) -> int:
    """Return the slots of all lanes."""
    return lanes[-1].first_slot + lanes[-1].scale.slots


def pool_communicators(team: Team, scales: Sequence[Scale]) -> list[MPI.Intracomm]:
    """Return the communicators of this rank's lanes to R-ranks over MPI; every rank calls this.

    Args:
        team: of this rank.
        scales: of all groups.
    """
    ranks = [
        ([] if group.alone else [member, *pool], len(scale.lanes))
        for group, scale in zip(team.groups, scales, strict=True)
        for member, pool in zip(group.members, group.pools, strict=True)
    ]
    return _communicators(team, ranks)


def group_lanes(team: Team, setup: Setup, scales: Sequence[Scale], timeline: Timeline) -> list[MpiGroupLane]:
    """Return the lanes of this rank's group as its members share them; none if it has one. Every rank calls this.

    Args:
        team: of this rank.
        setup: of the model.
        scales: of all groups.
        timeline: of this rank.
    """
    each = [(group, len(scale.lanes)) for group, scale in zip(team.groups, scales, strict=True)]
    members = [(group.members if len(group.members) > 1 else [], lanes) for group, lanes in each]
    stages = [(stage if len(stage) > 1 else [], lanes) for group, lanes in each for stage in group.stages]
    comms, of_stages = _communicators(team, members), iter(_communicators(team, stages))
    if not comms:
        return []
    me = team.me
    columns = setup.columns_of(me)
    route = Rotation(me.turns, len(setup.shapes_of(me)))
    in_stage = [next(of_stages, None) for _ in comms]
    device = torch.device(me.device)
    alike = in_stage[0] is None or _alike(in_stage[0], device)
    from hpcdecode.exchange.torch_sums import open_sums

    return [
        MpiGroupLane(comm, sums, me.tp, route, columns, timeline, alike=alike)
        for comm, sums in zip(comms, open_sums(in_stage, device), strict=True)
    ]


def _alike(stage: MPI.Intracomm, device: torch.device) -> bool:
    """Return whether the members of a stage compute with the same code and threads; all of them call this."""
    from hpcdecode.mpi.collectives import gather_all

    on_gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return len(set(gather_all(stage, f"{isa()} {torch.get_num_threads()} {on_gpu}", str))) == 1


def _communicators(team: Team, ranks: Sequence[tuple[list[int], int]]) -> list[MPI.Intracomm]:
    """Return a communicator for every lane that this rank is in; ranks: places of ranks, and their lanes."""
    if team.comm is None or not any(places for places, _ in ranks):
        return []
    from hpcdecode.exchange.communicators import communicators

    return communicators(team.comm, [places for places, lanes in ranks for _ in range(lanes)])


def home_communicators(team: Team) -> list[MPI.Intracomm]:
    """Return the communicator of the groups' homes, over which they reach the lead's desk; every rank calls this.

    There is none on other ranks, and if there is one group.
    """
    return _communicators(team, [(team.homes if len(team.homes) > 1 else [], 1)])


def local_links(team: Team, lanes: Sequence[Lane], attention: AttentionWorker, device: torch.device) -> Sequence[SLink]:
    """Return the lanes' ends of a rank that attends itself.

    Args:
        team: of this rank.
        lanes: of this rank.
        attention: of this rank.
        device: of the slices.
    """
    memory = open_memory(torch.device("cpu"), device)
    links = [LocalLink(attention, number, lane.first_slot, memory) for number, lane in enumerate(lanes)]
    return staged(links, device) if apart(team, team.group) else links


def lane_spec(options: EngineOptions, team: Team, setup: Setup, scale: Scale, device: torch.device) -> LaneSpec:
    """Return what both ends of a lane over MPI agree on, and where this rank has its memory.

    They share no memory where all goes by collectives.

    Args:
        options: of the engine.
        team: of this rank, one of the lane's.
        setup: of the model.
        scale: of the lane's group.
        device: of what is sent and received here.
    """
    from hpcdecode.exchange.memory import LaneSpec, shared_bytes

    dtype, slots, partition = getattr(torch, setup.dtype), scale.slots, partition_of(options, team.pool)
    own = setup.shapes_of(team.me)
    shapes = list(map(partition.shape, own))
    none = options.exchange == "collective"
    shared = (0, 0) if none else shared_bytes(shapes, slots, scale.prefill_tokens, dtype)
    computes = team.me.device if team.me.has_s else team.me.kv_device
    memory = open_memory(device, torch.device(computes))
    return LaneSpec(own, slots, dtype, partition, shared, options.overlap, device, memory)


def goes_by_collectives(options: EngineOptions, team: Team) -> bool:
    """Return whether lanes may go by collectives, the same on all ranks.

    With `auto` they may if the ranks are on several hosts and none sends memory of its GPU: R-ranks that share memory
    with their S-rank do not.
    """
    if options.route == "rotational" or options.prefill_ranks:
        return False
    if options.exchange == "auto" and not any(direct(options, team, rank) for rank in team.ranks):
        return len({rank.host for rank in team.ranks}) > 1
    return options.exchange == "collective"


def s_link(options: EngineOptions, team: Team, number: int, comm: MPI.Intracomm, spec: LaneSpec) -> MpiSLink:
    """Return the S-rank's end of its lane `number` over MPI."""
    if goes_by_collectives(options, team):
        from hpcdecode.exchange.collective import CollectiveSLink, Trial

        return CollectiveSLink(comm, spec, Trial(number) if options.exchange == "auto" else None)
    from hpcdecode.exchange.mpi import MpiSLink

    return MpiSLink(comm, spec)


def r_link(options: EngineOptions, team: Team, comm: MPI.Intracomm, spec: LaneSpec, first_slot: int) -> MpiRLink:
    """Return an R-rank's end of a lane over MPI; its slots begin with `first_slot`."""
    if goes_by_collectives(options, team):
        from hpcdecode.exchange.collective import CollectiveRLink

        return CollectiveRLink(comm, spec, first_slot)
    from hpcdecode.exchange.mpi import MpiRLink

    return MpiRLink(comm, spec, first_slot)


def r_links(
    options: EngineOptions,
    team: Team,
    setup: Setup,
    lanes: Sequence[Lane],
    comms: Sequence[MPI.Intracomm],
    device: torch.device,
) -> list[list[MpiRLink]]:
    """Return an R-rank's ends of each lane, one to each copy of the model.

    Args:
        options: of the engine.
        team: of this rank.
        setup: of the model.
        lanes: of this rank.
        comms: of its lanes, by group, copy and lane.
        device: of what is sent and received here.
    """
    groups = [[i for i, lane in enumerate(lanes) if lane.group == group] for group in team.own]
    ends: list[list[MpiRLink]] = [[] for _ in lanes]
    order = (i for group in groups for _ in range(team.me.copies) for i in group)
    for comm, i in zip(comms, order, strict=True):
        spec = lane_spec(options, team, setup, lanes[i].scale, device)
        ends[i].append(r_link(options, team, comm, spec, lanes[i].first_slot))
    return ends
