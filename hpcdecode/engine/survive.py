"""`--survive`: an engine goes on without ranks that are lost, all but the lead and its group.

A replica of one rank that is lost takes only its own sequences along: the desk gives its rows out again
(`remote.Clients`). Any other loss stops the work, which is given up as a whole: lanes, KV caches, sequences in flight.
The ranks that are left form a new team in their old roles, but for a group of which a member is lost, and the rows that
were in flight go out again with the tokens that they had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
    told: int

    @property
    def setup(self) -> Setup:
        """Return what every rank knows of the model."""

    def scales(self, desk: Desk | None) -> list[Scale]:
        """Return the sizes of the work for the groups that are left."""

    def open(self, scales: list[Scale]) -> None:
        """Open this rank's ends of its lanes, and the communicators of the work."""

    def metrics(self) -> Metrics:
        """Return what this rank counted in its last work."""

    def report(self) -> RankReport:
        """Return what this rank knows of the requests that it works on."""

    def give_up(self) -> None:
        """Drop lanes, KV cache and sequences."""


def work_on(
    engine: Survivor, desk: Desk | None, scales: list[Scale], run: Callable[[list[Scale]], Metrics | None]
) -> Metrics:
    """Call `run` until it comes to its end, each time with the ranks that are left and scales for them.

    Every rank calls this.

    Args:
        engine: of this rank.
        desk: on the lead; None on others.
        scales: of the first attempt.
        run: does the work, once the engine is open for the scales; returns None if rows are left.

    Returns:
        What `run` returned, with the counts of earlier attempts.

    Raises:
        RankLost: the others cannot go on.
    """
    earlier: list[Metrics] = []
    choose = partial(list[Scale], scales)
    while (metrics := _attempt(engine, choose, run)) is None:
        earlier.append(engine.metrics())
        report = engine.report()
        engine.give_up()
        while (reports := _unless_lost(engine, partial(_meet, engine, report))) is None:
            pass
        if desk:
            desk.take_back(reports)
            _tell(engine, desk.rows_left)
        choose = partial(engine.scales, desk)
    if desk:
        _tell(engine, desk.rows_left)
    for before in earlier:
        metrics = metrics.after(before)
    return metrics


def on_loss(engine: Survivor, s_ranks: Sequence[int]) -> Callable[[int, int], None] | None:
    """Return what notes on the lead that an S-rank is lost, by number, and how many rows it had, which others do.

    Return None if its loss stops the work of all: if it is not a replica of one rank.

    Args:
        engine: of the lead.
        s_ranks: places in the team, by number.
    """
    groups = engine.team.groups
    if not engine.options.survive or not all(group.alone and len(group.members) == 1 for group in groups):
        return None

    def note(number: int, rows: int) -> None:
        engine.lost.append(engine.team.ranks[s_ranks[number]])
        _tell(engine, rows)

    return note


def _attempt(
    engine: Survivor, choose: Callable[[], list[Scale]], run: Callable[[list[Scale]], Metrics | None]
) -> Metrics | None:
    """Open the engine for the scales that are chosen and return what `run` does with them; None if rows are left.

    All ranks know of all communicators before one waits in any: a rank that knows of a loss revokes those that it has.
    """

    def opened() -> list[Scale]:
        scales = choose()
        engine.open(scales)
        return scales

    team = engine.team
    scales = _unless_lost(engine, opened)
    return None if scales is None or engine.team is not team else _unless_lost(engine, partial(run, scales))


def _unless_lost(engine: Survivor, action: Callable[[], T | None]) -> T | None:
    """Return what `action` returns, or None if it is not done; the ranks that are left are the engine's team then."""
    from hpcdecode.mpi import ulfm  # a process alone needs no MPI library

    team = engine.team
    assert team.comm is not None, "--survive: expected a world of ranks"

    def watched() -> T | None:
        try:
            return action()
        finally:
            engine.timeline.enter("wait")

    outcome = ulfm.together(team.comm, engine.comms, watched)
    if outcome.result is None or not outcome.whole:
        engine.team = survivors(team)
        here = {r.rank for r in (*engine.team.ranks, *engine.lost)}
        engine.lost += [r for r in team.ranks if r.rank not in here]
    return outcome.result


def _meet(engine: Survivor, report: RankReport) -> list[RankReport]:
    """Return on every rank what the S-ranks leave behind, once all know what the others have room for."""
    options, team, setup = engine.options, engine.team, engine.setup
    together(team, lambda: partition_of(options, team.pool).check(setup.shapes) if team.pool else None)
    measure_room(options, team, setup)
    return team.gather_all(report, RankReport)


def _tell(engine: Survivor, rows: int) -> None:
    """Tell the user of the losses that have not been told, and how many rows are prefilled again."""
    untold = engine.lost[engine.told :]
    engine.told = len(engine.lost)
    if untold:
        gone = {rank.rank for rank in engine.lost}
        left = sum(rank.rank not in gone for rank in engine.team.ranks)
        logger.warning(
            f"hpcdecode: lost {named(untold)}; the job goes on with {left} rank{'s' * (left > 1)}, "
            f"and {rows:,} rows in flight are prefilled again"
        )
