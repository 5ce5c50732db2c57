"""`--survive`: an engine goes on without ranks that are lost, all but the lead.

What the loss stopped is given up as a whole: lanes, KV caches, sequences in flight. The ranks that are left form a new
team in their old roles, and the rows that were in flight go out again with the tokens that they had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from hpcdecode.config import EngineOptions
from hpcdecode.engine.desk import Desk, RankReport
from hpcdecode.engine.room import measure_room
from hpcdecode.engine.scale import Scale
from hpcdecode.engine.setup import Setup, partition_of, together
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team, named, survivors
from hpcdecode.report.metrics import Metrics
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Survivor(Protocol):
    """What an engine has to offer so that it can go on without ranks that are lost."""

    options: EngineOptions
    team: Team
    timeline: Timeline
    comms: list[MPI.Intracomm]
    lost: list[Rank]

    @property
    def setup(self) -> Setup:
        """Return what every rank knows of the model."""

    def scales(self, desk: Desk | None) -> list[Scale]:
        """Return the sizes of the work for the groups that are left."""

    def metrics(self) -> Metrics:
        """Return what this rank counted in its last work."""

    def report(self) -> RankReport:
        """Return what this rank knows of the requests that it works on."""

    def give_up(self) -> None:
        """Drop lanes, KV cache and sequences."""


def work_on(engine: Survivor, desk: Desk | None, scales: list[Scale], run: Callable[[list[Scale]], Metrics]) -> Metrics:
    """Call `run` until it comes to its end, each time with the ranks that are left and scales for them.

    Every rank calls this.

    Args:
        engine: of this rank.
        desk: on the lead; None on others.
        scales: of the first attempt.
        run: does the work.

    Returns:
        What `run` returned, with the counts of earlier attempts.

    Raises:
        RankLost: the others cannot go on.
    """
    earlier: list[Metrics] = []
    told = 0  # of the lost
    attempt = partial(run, scales)
    while (metrics := _unless_lost(engine, attempt)) is None:
        earlier.append(engine.metrics())
        report = engine.report()
        engine.give_up()
        while (reports := _unless_lost(engine, partial(_meet, engine, report))) is None:
            pass
        if desk:
            desk.take_back(reports)
            _say(engine, desk, engine.lost[told:])
        told = len(engine.lost)
        attempt = partial(_run_again, engine, desk, run)
    for before in earlier:
        metrics = metrics.after(before)
    return metrics


def _run_again(engine: Survivor, desk: Desk | None, run: Callable[[list[Scale]], Metrics]) -> Metrics:
    return run(engine.scales(desk))


def _unless_lost(engine: Survivor, action: Callable[[], T]) -> T | None:
    """Return what `action` returns, or None if a rank was lost; those that are left are the engine's team then."""
    from hpcdecode.mpi import ulfm  # a process alone needs no MPI library

    team = engine.team
    assert team.comm is not None, "--survive: expected a world of ranks"

    def watched() -> T:
        try:
            return action()
        finally:
            engine.timeline.enter("wait")

    result = ulfm.unless_lost(team.comm, engine.comms, watched)
    if result is None:
        engine.team = survivors(team)
        here = {r.rank for r in engine.team.ranks}
        engine.lost += [r for r in team.ranks if r.rank not in here]
    return result


def _meet(engine: Survivor, report: RankReport) -> list[RankReport]:
    """Return on every rank what the S-ranks leave behind, once all know what the others have room for."""
    options, team, setup = engine.options, engine.team, engine.setup
    together(team, lambda: partition_of(options, team.pool).check(setup.shapes))
    measure_room(options, team, setup)
    return team.gather_all(report, RankReport)


def _say(engine: Survivor, desk: Desk, lost: list[Rank]) -> None:
    count = len(engine.team.ranks)
    logger.warning(
        f"hpcdecode: lost {named(lost)}; the job goes on with {count} rank{'s' * (count > 1)}, "
        f"and {desk.rows_left:,} rows in flight are prefilled again"
    )
