"""The scheduler of a lane in its steady state, and ends of a lane that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hpcdecode.attention.footprint import WHOLE
from hpcdecode.engine.desk import RankReport
from hpcdecode.exchange.base import OnlyEnd
from hpcdecode.planning.steady_load import SteadyLoad
from hpcdecode.planning.steady_slots import places_of
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.step import Step

_TOKEN = 7
_NO_END = 1 << 40  # tokens of capacity: more than any load takes


class SteadyScheduler(Scheduler):
    """Scheduler of a lane whose sequences all decode from its first step on.

    Args:
        lane: Index of the lane.
        load: Of all lanes.
        places: (R-rank, slot) of each of the lane's sequences.
        r_ranks: Number of R-ranks.

    Attributes:
        before_second_step: Called before the lane's second step; set it to measure from there.
    """

    def __init__(self, lane: int, load: SteadyLoad, places: Sequence[tuple[int, int]], r_ranks: int):
        super().__init__(
            lane, _PromptFeed(load), Placement([_NO_END] * r_ranks, WHOLE, load.lanes), load.limits, Stops()
        )
        self.before_second_step: Callable[[], None] | None = None
        self._steps = 0
        params = SamplingParams(ignore_eos=True)
        for line, (rank, slot) in enumerate(places):
            prompt = Prompt(line, str(line), [_TOKEN] * load.context, params)
            request = Request(prompt, load.steps + 2, lane)
            sequence = SequenceState(request, rank=rank, slot=slot, prefilled=load.context)
            sequence.generated.append(_TOKEN)
            request.sequences.append(sequence)
            self.slots.hold(sequence)
            self.requests[line] = request
            self.decoding.append(sequence)
            self.placement.add(sequence)

    def next_step(self, now: int) -> Step:
        """Return the plan of lane step `now`."""
        self._steps += 1
        if self._steps == 2 and self.before_second_step:
            self.before_second_step()
        return super().next_step(now)


def steady_schedulers(load: SteadyLoad, r_ranks: int) -> list[SteadyScheduler]:
    """Return the schedulers of a load's lanes, whose sequences lie on so many R-ranks."""
    places = [(rank, slot) for rank, slot in places_of(load, r_ranks).tolist()]
    return [SteadyScheduler(lane, load, places, r_ranks) for lane in range(load.lanes)]


class _PromptFeed:
    """Feed of a lane: rows that end with their prompt."""

    def __init__(self, load: SteadyLoad):
        lines = range(load.lane_batch, load.lane_batch + load.prompts)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self._rows = [Prompt(line, str(line), [_TOKEN] * load.prompt, params) for line in lines]

    def peek(self) -> Prompt | None:
        """Return the next row, or None."""
        return self._rows[-1] if self._rows else None

    def at_hand(self) -> Prompt | None:
        """Return what `peek` does: nothing waits here."""
        return self.peek()

    def exhausted(self) -> bool:
        """Return whether no row is there."""
        return self.peek() is None

    def pop(self) -> Prompt:
        """Take the next row."""
        return self._rows.pop()

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Raise IndexError: every row of a load must run."""
        raise IndexError(reason)


class NoLink(OnlyEnd):
    """An S-rank's end of a lane whose attention takes no time."""

    def send_plan(self, plan: Plan) -> None:
        """Do nothing."""

    def answers_prompts(self, layer: int) -> bool:
        """Return False."""
        return False

    def send_rows(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Answer with zeros."""
        o.zero_()

    def Test(self) -> bool:
        """Return True."""
        return True

    def recv_output(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class NoSink:
    """A sink that drops finished requests."""

    def finish(self, request: Request) -> None:
        """Do nothing."""

    def last_report(self, unfinished: list[Unfinished]) -> RankReport:
        """Raise NotImplementedError: a load is never interrupted."""
        raise NotImplementedError("a steady load is never interrupted")
