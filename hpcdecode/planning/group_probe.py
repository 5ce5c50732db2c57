"""What a step takes groups of several S-ranks, each with its part of the model, as replicas over all ranks of a job."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING

import msgspec

from hpcdecode.config import EngineOptions
from hpcdecode.engine.weight_facts import weight_facts
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.fit import Sample, predicted
from hpcdecode.planning.steady_engine import SteadyEngine
from hpcdecode.planning.steady_load import OperationSeconds, SteadyLoad
from hpcdecode.ranks.team import Team, assemble
from hpcdecode.system.memory import available_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)
_SPLIT_LOADS = (
    *(SteadyLoad(2 * batch, 2, 64, 4) for batch in (16, 64)),
    SteadyLoad(64, 2, 256, 4),
    SteadyLoad(64, 2, 64, 4, prompt=640, chunk=128),
)
_ROOM = 1.5  # times a member's weights that must be free, for what is held while they are packed


def measure_replicas(
    comm: MPI.Intracomm, options: EngineOptions, members: int, loads: Sequence[SteadyLoad], passes: int
) -> list[Sample]:
    """Return what was measured, as of one process: a home's seconds; what it adds up and waits for counts as slices.

    All groups run at the same time; seconds are the mean over their homes. Every rank calls this.

    Args:
        comm: Of all ranks.
        options: Of the engine: model and data types.
        members: S-ranks of a group, a divisor of the ranks.
        loads: To measure.
        passes: How often each is measured, after a short one.

    Returns:
        Nothing if a rank has no room for its part beside what it holds already; the lead warns of it.
    """
    engine = _engine(comm, msgspec.structs.replace(options, layout="replicas", tp=members))
    if engine is None:
        return []
    samples = [Sample(load, [_home(engine.team, ranks)]) for load, ranks in _measured(engine, loads, passes)]
    for _, (home,) in samples:
        home["slice"] += home.pop("sum", 0.0) + home.pop("wait", 0.0)
    return samples


def split_ratio(comm: MPI.Intracomm, options: EngineOptions, members: int, forecast: Cost, passes: int) -> float | None:
    """Return how many times its forecast a step of one group takes beside R-ranks, the median over some loads.

    Args:
        comm: Of all ranks.
        options: Of the engine: model and data types.
        members: S-ranks of the group.
        forecast: Cost of a member.
        passes: How often each load is measured.

    Returns:
        None if the other ranks cannot be R-ranks of all members, or the group has no room.
    """
    others = comm.size - members
    if others < members or others % members:
        return None
    engine = _engine(comm, msgspec.structs.replace(options, layout="split", s_ranks=members, tp=members))
    if engine is None:
        return None
    ranks = 1 + others // members
    measured = _measured(engine, _SPLIT_LOADS, passes)
    return median(own[0]["step"] / predicted(forecast, load, ranks) for load, own in measured)


def _engine(comm: MPI.Intracomm, options: EngineOptions) -> SteadyEngine | None:
    """Return the engine on the ranks as these options lay them out, or None if weights have no room."""
    team = assemble(comm, options.wishes, weights=weight_facts(options))
    if not _has_room(team, options.tp or 1):
        if team.lead:
            logger.warning(f"groups of {options.tp} ranks are not measured but forecast: no room for their weights")
        return None
    team.pin()
    return SteadyEngine(options, team)


def _measured(
    engine: SteadyEngine, loads: Sequence[SteadyLoad], passes: int
) -> list[tuple[SteadyLoad, list[OperationSeconds]]]:
    """Return the seconds of all ranks for each load, as often as there are passes."""
    for load in loads:  # products have their kernels made, and are not counted
        engine.steady(replace(load, steps=2))
    return [(load, engine.steady(load)) for _ in range(passes) for load in loads]


def _has_room(team: Team, members: int) -> bool:
    """Return whether the members of every host have room for their parts."""
    beside = sum(rank.host == team.me.host for rank in team.ranks)
    enough = available_bytes() >= _ROOM * beside * max(rank.weights for rank in team.ranks) / members
    return all(team.gather_all(enough, bool))


def _home(team: Team, ranks: Sequence[OperationSeconds]) -> OperationSeconds:
    """Return a home's seconds by operation, the mean over all groups."""
    homes = [ranks[place] for place in team.homes]
    return {o: fmean(own.get(o, 0.0) for own in homes) for o in {o for own in homes for o in own}}
