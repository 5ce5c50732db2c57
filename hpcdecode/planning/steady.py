"""Lanes in their steady state, run by the workers of a job: what each of their operations takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hpcdecode.attention.base import KvCache, PromptAttention
from hpcdecode.attention.open import open_layers
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.attention.recurrent_shapes import RecurrentShape, example_weights
from hpcdecode.attention.shapes import LayerShape, attention_shapes, recurrent_shapes
from hpcdecode.attention.sizes import capacity_for
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.programs import PlanOrder, serve
from hpcdecode.engine.r_rank import lane_program
from hpcdecode.engine.s_rank import SRank
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.local import LocalLink
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.shares import Share
from hpcdecode.model import SplitModel
from hpcdecode.planning.kv_unit import KvUnit
from hpcdecode.planning.paged_cache import paged_cache
from hpcdecode.planning.steady_lane import NoLink, NoSink, steady_schedulers
from hpcdecode.planning.steady_load import OperationSeconds, SteadyLoad, seconds_since
from hpcdecode.planning.steady_slots import attention_of, fill_slots, places_of, truncate_slot
from hpcdecode.ranks.team import Team
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.plan import Plan
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.exchange.memory import LaneSpec


class Steady:
    """One rank of a group with one S-rank; every rank makes the same calls with the same loads.

    Args:
        team: The ranks of the group.
        shapes: Of every layer.
        model: On the S-rank, else None.
        kv_dtype: Data type of the KV cache; None for that of the model.
        beside: All ranks of the world, if other groups are at work at the same time; they begin together.

    Attributes:
        parts: Number of R-ranks.
        dtype: Name of the data type of q, k, v and o.
    """

    def __init__(
        self,
        team: Team,
        shapes: list[LayerShape | RecurrentShape],
        model: SplitModel | None,
        kv_dtype: str | None = None,
        beside: Team | None = None,
    ):
        self.team, self.shapes, self.model = team, shapes, model
        self._world = beside or team
        self.parts = len(team.r_ranks)
        self.dtype = team.broadcast(str(model.dtype).removeprefix("torch.") if model else None, str)
        self.kv_dtype = kv_dtype or self.dtype

    def run(self, load: SteadyLoad) -> list[OperationSeconds]:
        """Return the seconds of a step by operation, of every rank; `step` is their sum.

        One more step comes first, which the S-rank does not count: threads and caches are cold in it.
        """
        timeline = Timeline()
        worker = self._worker(load, timeline) if self.team.me.has_r else None
        if self.model is not None:
            own = self._run_s_rank(self.model, load, timeline, worker)
        else:
            assert worker is not None, "a rank has slices or attention"
            own = self._run_r_rank(load, timeline, worker)
        return self.team.gather_all({**own, "step": sum(own.values())}, dict[str, float])

    def alone(self, load: SteadyLoad) -> tuple[float, float]:
        """Return the seconds of a step of the S-rank and of the slowest R-rank, one after the other, without links."""
        s = self._slowest(self._s_work(self.model, load)() if self.model else 0.0)
        return s, self._slowest(0.0 if self.model else self._r_work(load)())

    def at_once(self, load: SteadyLoad) -> tuple[float, float]:
        """Return what `alone` returns with all ranks at work, each until all have had a step.

        The ranks leave each other less of the machine then.
        """
        assert self.team.comm is not None, "at_once: expected several ranks"
        work = self._s_work(self.model, load) if self.model else self._r_work(load)
        self._wait_for_all()
        steps = [work()]
        done = self.team.comm.Ibarrier()
        while not done.Test():
            steps.append(work())
        mean = sum(steps) / len(steps)
        return self._slowest(mean if self.model else 0.0), self._slowest(0.0 if self.model else mean)

    def _wait_for_all(self) -> None:
        self._world.gather_all(0, int)

    def _slowest(self, seconds: float) -> float:
        return max(self.team.gather_all(seconds, float))

    def _run_s_rank(
        self, model: SplitModel, load: SteadyLoad, timeline: Timeline, worker: AttentionWorker | None
    ) -> OperationSeconds:
        """Run the load's lanes; `worker` is this process's own attention, if there is no other rank."""
        links = self._s_links(load, worker)
        self._wait_for_all()  # their KV caches are filled
        timeline.enter("other")
        own = self._generate(model, load, links, timeline, worker)
        for link in links:
            link.close()
        return own

    def _run_r_rank(self, load: SteadyLoad, timeline: Timeline, worker: AttentionWorker) -> OperationSeconds:
        """Attend for the load's lanes."""
        from hpcdecode.exchange.mpi import MpiRLink

        spec, slots = self._lane_spec(load), load.limits.slots
        links = [MpiRLink(comm, spec, slots * lane) for lane, comm in enumerate(self._lane_comms(load))]
        self._wait_for_all()
        timeline.enter("other")
        before, order = timeline.shares(), PlanOrder()
        serve([lane_program(lane, [link], worker, order) for lane, link in enumerate(links)], timeline)
        own = seconds_since(before, timeline, load.steps + 1)
        for link in links:
            link.close()
        return own

    def _s_links(self, load: SteadyLoad, worker: AttentionWorker | None) -> list[SLink]:
        """Return the S-rank's ends of all lanes."""
        if worker is not None:
            return [LocalLink(worker, lane, load.limits.slots * lane) for lane in range(load.lanes)]
        from hpcdecode.exchange.mpi import MpiSLink

        spec = self._lane_spec(load)
        return [MpiSLink(comm, spec) for comm in self._lane_comms(load)]

    def _lane_spec(self, load: SteadyLoad) -> LaneSpec:
        """Return what both ends of every lane agree on."""
        from hpcdecode.exchange.memory import LaneSpec, shared_bytes

        dtype: torch.dtype = getattr(torch, self.dtype)
        sizes = (0, 0) if load.messages else shared_bytes(self.shapes, load.lane_batch, load.chunk, dtype)
        return LaneSpec(self.shapes, load.limits.slots, dtype, Partition("request", self.parts), sizes, load.pieces)

    def _lane_comms(self, load: SteadyLoad) -> list[MPI.Intracomm]:
        assert self.team.comm is not None, "links between ranks: expected several ranks"
        return [self.team.comm.Dup() for _ in range(load.lanes)]

    def _s_work(self, model: SplitModel, load: SteadyLoad) -> Callable[[], float]:
        """Return a function that runs the S-rank's steps as if attention took no time, and returns a step's seconds."""
        return lambda: sum(self._generate(model, load, [NoLink()] * load.lanes, Timeline()).values())

    def _r_work(self, load: SteadyLoad) -> Callable[[], float]:
        """Return a function that attends to random q, k and v on this R-rank, and returns a step's seconds."""
        timeline = Timeline()
        worker = self._worker(load, timeline)
        plan = Plan(decode=places_of(load, self.parts))
        shares = [Share(plan, self._r_rank, load.limits.slots * lane) for lane in range(load.lanes)]
        widest = max(s.row_columns for s in self.shapes)
        rows = torch.randn(len(shares[0].whole.decode_rows), widest).to(getattr(torch, self.dtype))

        def step() -> float:
            timeline.lap()
            for lane, share in enumerate(shares):
                worker.apply(lane, share)
            for layer, shape in enumerate(self.shapes):
                for lane, share in enumerate(shares):
                    out = torch.empty(len(rows), shape.out_columns, dtype=rows.dtype)
                    worker.attend(lane, layer, share.whole, rows[:, : shape.row_columns], rows[:0], out)
            seconds = timeline.lap()
            for share in shares:
                for slot in share.whole.decode_slots.tolist():
                    truncate_slot(worker.kv_cache, slot, load.context)
            return seconds

        return step

    @property
    def _r_rank(self) -> int:
        """Return this R-rank's index among the R-ranks."""
        return self.team.r_ranks.index(self.team.place)

    def _generate(
        self,
        model: SplitModel,
        load: SteadyLoad,
        links: Sequence[SLink],
        timeline: Timeline,
        worker: AttentionWorker | None = None,
    ) -> OperationSeconds:
        """Run the S-rank's lanes to their end; return the seconds of a step, without the first."""
        schedulers = steady_schedulers(load, self.parts)
        before: OperationSeconds = {}
        schedulers[0].before_second_step = lambda: before.update(timeline.shares())
        prompts = self._prompt_attention(model, worker)
        SRank(model, links, schedulers, NoSink(), Stops(), PromptKvCache(prompts), timeline).run(lambda: None)
        return seconds_since(before, timeline, load.steps)

    def _prompt_attention(self, model: SplitModel, worker: AttentionWorker | None) -> PromptAttention:
        """Return what attends from prompts, as jobs have it."""
        me, attend = self.team.me, attention_shapes(self.shapes)
        if not attend:
            return TorchPromptAttention(attend, model.dtype, model.device)
        cpus, beside = me.cpus if me.pinned else None, attention_of(worker.kv_cache) if worker else None
        return CpuPromptAttention(attend, dtype=self.dtype, threads=me.threads, cpus=cpus, beside=beside)

    def _worker(self, load: SteadyLoad, timeline: Timeline) -> AttentionWorker:
        """Return an attention worker with the sequences' K and V in its KV cache."""
        slots = load.limits.slots
        held = load.batch // self.parts + load.lanes
        unit = KvUnit.of(self.shapes, self.kv_dtype)
        sequences, prompts = unit.held(load.context + load.steps + 128), unit.held(load.prompt + 128)
        capacity = int(held * sequences + 2 * load.lanes * prompts)
        kv_cache = self._kv_cache(max(capacity, capacity_for(self.shapes, self.kv_dtype, 1 << 20)), load)
        own = places_of(load, self.parts)[self._r_rank :: self.parts, 1]
        filled = [slot for lane in range(load.lanes) for slot in (own + slots * lane).tolist()]
        fill_slots(kv_cache, self.shapes, filled, load, getattr(torch, self.dtype))
        return AttentionWorker(kv_cache, [None] * len(self.shapes), timeline)

    def _kv_cache(self, tokens: int, load: SteadyLoad) -> KvCache:
        """Return an empty KV cache for so many tokens."""
        me, slots = self.team.me, load.limits.slots * load.lanes
        cpus, team = me.cpus if me.pinned else None, self.model is not None
        if load.paged:
            return paged_cache(self.shapes, self.kv_dtype, tokens, slots, me.threads, cpus, team)
        return open_layers(
            self.shapes,
            [example_weights(shape) for shape in recurrent_shapes(self.shapes)],
            kv_dtype=self.kv_dtype,
            capacity_tokens=tokens,
            max_sequences=slots,
            threads=me.threads,
            cpus=cpus,
            team=team,
        )
