"""What the lanes of an S-rank wait for between their steps: their turn, and rows if none has any."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdecode.exchange.base import SLink
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.admission import Feed
from hpcdecode.schedule.scheduler import Scheduler


class RowArrival:
    """Is done when a row has come, or none will.

    Args:
        feed: Where rows come from.
    """

    def __init__(self, feed: Feed):
        self._feed = feed

    def Test(self) -> bool:
        """Return whether it is done."""
        return self._feed.peek() is not None or self._feed.exhausted()


class SwapReturn:
    """Is done when something has come back from tiers, or at once if lanes have other work.

    Args:
        links: Of the lanes.
        schedulers: Of the lanes.
    """

    def __init__(self, links: Sequence[SLink], schedulers: Sequence[Scheduler]):
        self._links, self._schedulers = links, schedulers

    def Test(self) -> bool:
        """Return whether it is done; schedulers take note of what has come."""
        for link, scheduler in zip(self._links, self._schedulers, strict=True):
            scheduler.tiers.note(link.take_swapped())
        return any(
            scheduler.tiers.has_news or scheduler.active > len(scheduler.tiers.returning)
            for scheduler in self._schedulers
        )


class LaneRounds:
    """Lets lanes begin their steps in rounds: a step of each, in their order.

    Args:
        lanes: number of lanes.
    """

    def __init__(self, lanes: int):
        self._begun: dict[int, int] = dict.fromkeys(range(lanes), 0)  # steps, by lane

    def turn(self, lane: int) -> Waitable:
        """Return what is done when a lane may begin its next step."""
        return _LaneTurn(self, lane)

    def begins(self, lane: int) -> bool:
        """Return whether a lane may begin its next step."""
        own = self._begun[lane]
        return all(begun > own if other < lane else begun >= own for other, begun in self._begun.items())

    def following(self, lane: int) -> int:
        """Return the number of a lane's next step."""
        return self._begun[lane]

    def begin(self, lane: int) -> int:
        """Begin a lane's next step and return its number."""
        step = self._begun[lane]
        self._begun[lane] += 1
        return step

    def leave(self, lane: int) -> None:
        """Wait for a lane no longer."""
        del self._begun[lane]


class _LaneTurn:
    def __init__(self, rounds: LaneRounds, lane: int):
        self.rounds, self.lane = rounds, lane

    def Test(self) -> bool:
        return self.rounds.begins(self.lane)
