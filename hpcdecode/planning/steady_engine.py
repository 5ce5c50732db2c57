"""The engine of a job whose lanes are in their steady state: groups of any layout, as jobs run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.links import Lane
from hpcdecode.engine.programs import Program
from hpcdecode.engine.s_rank import SRank
from hpcdecode.engine.scale import Scale
from hpcdecode.exchange.base import SLink
from hpcdecode.planning.steady_lane import NoSink, steady_schedulers
from hpcdecode.planning.steady_load import OperationSeconds, SteadyLoad, seconds_since
from hpcdecode.planning.steady_slots import fill_slots, places_of
from hpcdecode.requests.stops import Stops
from hpcdecode.system.timeline import Timeline

_NO_LIMIT = 1 << 40  # tokens: more than any load takes


class SteadyEngine(Engine):
    """The ranks of a job; every rank makes the same calls with the same loads, which each of its groups runs.

    Attention is divided by request, and by the heads of members.
    """

    _load: SteadyLoad
    _own: OperationSeconds

    def steady(self, load: SteadyLoad) -> list[OperationSeconds]:
        """Return the seconds of a step by operation, of every rank; `step` is their sum.

        One more step comes first, which homes do not count: threads and caches are cold in it.
        """
        self._load, self.timeline, self._attention = load, Timeline(), None
        batch = load.lane_batch + 1
        scale = Scale(load.lanes * batch, 1, load.steps + 1, _NO_LIMIT, max(load.chunk, 1), [batch] * load.lanes)
        scales = [scale] * len(self.team.groups)
        self.open(scales)
        self._run(scales, self._run_steady)
        return self.team.gather_all({**self._own, "step": sum(self._own.values())}, dict[str, float])

    def _run_steady(self) -> bool:
        """Run the lanes of an S-rank."""
        before, steps = self._begin(), self._load.steps
        if self.team.place in self.team.homes:
            schedulers = steady_schedulers(self._load, len(self.team.pool))
            schedulers[0].before_second_step = lambda: before.update(self.timeline.shares())
            links, prompts = cast("Sequence[SLink]", self._work.links), self._open_prompts()
            self._work.s_rank = SRank(
                *(self.model, links, schedulers, NoSink(), Stops(), prompts, self.timeline), groups=self._work.groups
            )
            self._work.s_rank.run(lambda: None)
        else:
            self._run_member()
            steps += 1
        self._own = seconds_since(before, self.timeline, steps)
        return True

    def _serve_r(self, programs: Sequence[Program], between: Callable[[], None] | None) -> None:
        """Attend for all lanes to their end."""
        before = self._begin()
        super()._serve_r(programs, between)
        self._own = seconds_since(before, self.timeline, self._load.steps + 1)

    def _begin(self) -> OperationSeconds:
        """Wait until all lanes are open and their KV caches filled; return the timeline's shares."""
        self.team.gather_all(0, int)
        self.timeline.enter("other")
        return self.timeline.shares()

    def _open_attention(self, lanes: Sequence[Lane]) -> AttentionWorker:
        """Return an attention worker with the sequences' K and V in its KV cache."""
        team, worker = self.team, super()._open_attention(lanes)
        places = places_of(self._load, len(team.pool))
        slots = places[places[:, 0] == team.pool.index(team.place), 1]
        filled = [slot for lane in lanes for slot in (slots + lane.first_slot).tolist()]
        dtype = getattr(torch, self.setup.dtype)
        fill_slots(worker.kv_cache, self.setup.shapes_of(team.me), filled, self._load, dtype)
        return worker
