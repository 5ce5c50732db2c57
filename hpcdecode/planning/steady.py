"""Lanes in their steady state: so many sequences of one length, each a token a step, through the workers of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention.base import KvCache, LayerShape, capacity_for
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import PromptAttention
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.r_rank import Turns, lane_program, serve
from hpcdecode.engine.s_rank import SRank
from hpcdecode.exchange.base import Share, SLink
from hpcdecode.exchange.local import LocalLink
from hpcdecode.exchange.partition import Partition
from hpcdecode.model import SplitModel
from hpcdecode.ranks.launch import Team
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.step import Step
from hpcdecode.system.timeline import Timeline

_FILL = 1024  # random rows that are repeated
_TOKEN = 7


@dataclass(frozen=True)
class SteadyLoad:
    """batch sequences of `context` tokens over `lanes` lanes. pieces: of an R-rank's work in a layer; messages: send
    the activations as between hosts, not through shared memory. prompt, chunk: tokens of the prompts that ride along
    with every lane, and of them in a step; 0 for none."""

    batch: int
    lanes: int
    context: int
    steps: int
    pieces: int = 1
    messages: bool = False
    prompt: int = 0
    chunk: int = 0

    @property
    def lane_batch(self) -> int:
        return self.batch // self.lanes

    @property
    def prompts(self) -> int:
        """Of every lane; the last is complete in the last step."""
        return (self.steps + 1) * self.chunk // self.prompt if self.prompt else 0

    @property
    def limits(self) -> LaneLimits:
        """Of a lane: beside its sequences, one prompt after the other."""
        return LaneLimits(self.lane_batch + 1, 1, self.steps + 1, max(self.chunk, 1), None, schedule="fifo")


class Steady:
    """One rank of a world with one S-rank. model: on the S-rank. Every rank calls `run` with the same load."""

    def __init__(self, team: Team, shapes: list[LayerShape], model: SplitModel | None, kv_dtype: str | None = None):
        self.team, self.shapes, self.model = team, shapes, model
        self.parts = len(team.r_ranks)
        self.dtype = team.broadcast(str(model.dtype).removeprefix("torch.") if model else None, str)
        self.kv_dtype = kv_dtype or self.dtype

    def run(self, load: SteadyLoad) -> list[dict[str, float]]:
        """Seconds of a step by operation, of every rank on every rank; `step` of the S-rank is that of all lanes.

        One more step comes first, which the S-rank does not count: threads and caches are cold in it.
        """
        timeline = Timeline()
        part = self._part(load, timeline) if self.team.me.has_r else None
        links = self._links(load, part)
        self.team.gather_all(0, int)  # all are filled
        timeline.enter("other")
        if self.model:
            own = self._run_s(load, links, timeline, part)
        else:
            before, turns = timeline.shares(), Turns()
            serve([lane_program(i, link, part, turns) for i, link in enumerate(links)], timeline)
            own = _since(before, timeline, load.steps + 1)
        for link in links if self.team.comm else ():
            link.close()
        return self.team.gather_all({**own, "step": sum(own.values())}, dict[str, float])

    def _links(self, load: SteadyLoad, part: AttentionWorker | None) -> list:
        """Of all lanes, this rank's end."""
        slots, comm = load.limits.slots, self.team.comm
        if comm is None:
            return [LocalLink(part, lane, slots * lane) for lane in range(load.lanes)]
        from hpcdecode.exchange.mpi import MpiRLink, MpiSLink
        from hpcdecode.exchange.wire import shared_sizes

        dtype = getattr(torch, self.dtype)
        sizes = (0, 0) if load.messages else shared_sizes(self.shapes, load.lane_batch, load.chunk, dtype)
        wire = (self.shapes, slots, dtype, sizes, Partition("request", self.parts), load.pieces)
        comms = [comm.Dup() for _ in range(load.lanes)]
        if part is None:
            return [MpiSLink(c, *wire) for c in comms]
        return [MpiRLink(c, *wire, first_slot=slots * lane) for lane, c in enumerate(comms)]

    def alone(self, load: SteadyLoad) -> tuple[float, float]:
        """Seconds of a step of the S-rank and of the slowest R-rank, one side after the other, without an exchange."""
        s = self._most(self._s_work(load)() if self.model else 0.0)
        return s, self._most(0.0 if self.model else self._r_work(load)())

    def at_once(self, load: SteadyLoad) -> tuple[float, float]:
        """The same with all ranks at work, each for as long as any: what they leave each other of the machine."""
        work = self._s_work(load) if self.model else self._r_work(load)
        self.team.gather_all(0, int)
        steps = [work()]
        done = self.team.comm.Ibarrier()
        while not done.Test():
            steps.append(work())
        mean = sum(steps) / len(steps)
        return self._most(mean if self.model else 0.0), self._most(0.0 if self.model else mean)

    def _most(self, seconds: float) -> float:
        return max(self.team.gather_all(seconds, float))

    def _s_work(self, load: SteadyLoad) -> Callable[[], float]:
        """Runs the S-rank's steps when attention takes no time; returns the seconds of one."""
        return lambda: sum(self._run_s(load, [_NoLink()] * load.lanes, Timeline()).values())

    def _r_work(self, load: SteadyLoad) -> Callable[[], float]:
        """Runs a step's attention on this R-rank when its rows are there at once; returns its seconds."""
        timeline = Timeline()
        part = self._part(load, timeline)
        plan = Plan(decode=self._decode(load))
        shares = [Share(plan, self._rank, load.limits.slots * lane) for lane in range(load.lanes)]
        widest = max(s.row_columns for s in self.shapes)
        rows = torch.randn(len(shares[0].whole.decode_rows), widest).to(getattr(torch, self.dtype))

        def step() -> float:
            timeline.lap()
            for lane, share in enumerate(shares):
                part.begin(lane, share)
            for layer, shape in enumerate(self.shapes):
                for lane, share in enumerate(shares):
                    out = torch.empty(len(rows), shape.out_columns, dtype=rows.dtype)
                    part.attend(lane, layer, share.whole, rows[:, : shape.row_columns], rows[:0], out)
            seconds = timeline.lap()
            for share in shares:
                for slot in share.whole.decode_slots.tolist():
                    part.store.truncate(slot, load.context)
            return seconds

        return step

    @property
    def _rank(self) -> int:
        """This R-rank's index among them."""
        return self.team.r_ranks.index(self.team.me.rank)

    def _decode(self, load: SteadyLoad) -> np.ndarray:
        """R-rank and slot of a lane's sequences; prompts take slots from the other end."""
        i = np.arange(load.lane_batch)
        return np.stack([i % self.parts, load.limits.slots - 1 - i], axis=1).astype(np.int32)

    def _run_s(
        self, load: SteadyLoad, links: list[SLink], timeline: Timeline, part: AttentionWorker | None = None
    ) -> dict[str, float]:
        schedulers = [self._scheduler(lane, load) for lane in range(load.lanes)]
        before: dict[str, float] = {}
        schedulers[0].second = lambda: before.update(timeline.shares())
        me, store = self.team.me, part.store if part else None
        cpus = me.cpus if me.pinned else None
        prompts = PromptAttention(self.shapes, dtype=self.dtype, threads=me.threads, cpus=cpus, beside=store)
        worker = SRank(self.model, self.shapes, links, schedulers, _NoSink(), Stops(), prompts, timeline)
        worker.run(lambda: None)
        return _since(before, timeline, load.steps)

    def _scheduler(self, lane: int, load: SteadyLoad) -> _SteadyScheduler:
        """With all its sequences decoding, and the prompts to come."""
        placement = Placement([1 << 40] * self.parts, 1, load.lanes)
        scheduler = _SteadyScheduler(lane, _Prompts(load), placement, load.limits, Stops())
        params = SamplingParams(ignore_eos=True)
        for (rank, slot), line in zip(self._decode(load).tolist(), range(load.lane_batch), strict=True):
            prompt = Prompt(line, str(line), [_TOKEN] * load.context, params)
            request = Request(prompt, load.steps + 2, lane)
            sequence = SequenceState(request, rank=rank, slot=slot, prefilled=load.context)
            sequence.generated.append(_TOKEN)
            request.sequences.append(sequence)
            scheduler.requests[line] = request
            scheduler.decoding.append(sequence)
            placement.add(sequence)
        return scheduler

    def _part(self, load: SteadyLoad, timeline: Timeline) -> AttentionWorker:
        """With the sequences' K and V in its store."""
        slots, me = load.limits.slots, self.team.me
        held = load.batch // self.parts + load.lanes
        capacity = held * (load.context + load.steps + 128) + 2 * load.lanes * (load.prompt + 128)
        store = open_kv_cache(
            self.shapes,
            kv_dtype=self.kv_dtype,
            capacity_tokens=max(capacity, capacity_for(self.shapes, self.kv_dtype, 1 << 20)),
            max_sequences=slots * load.lanes,
            threads=me.threads,
            cpus=me.cpus if me.pinned else None,
            team=self.model is not None,
        )
        random = torch.randn(_FILL, max(s.kv_columns for s in self.shapes)).to(getattr(torch, self.dtype))
        for lane in range(load.lanes):
            for slot in (self._decode(load)[self._rank :: self.parts, 1] + slots * lane).tolist():
                self._fill(store, slot, load.context + load.steps + 1, random)  # so that no step touches new memory
                store.truncate(slot, load.context)
        return AttentionWorker(store, [None] * len(self.shapes), timeline)

    def _fill(self, store: KvCache, slot: int, tokens: int, random: Tensor) -> None:
        for start in range(0, tokens, _FILL):
            count = min(_FILL, tokens - start)
            store.extend([slot], [count])
            for layer, shape in enumerate(self.shapes):
                store.append(layer, [slot], [count], random[:count, : shape.kv_columns].contiguous())


def _since(before: dict[str, float], timeline: Timeline, steps: int) -> dict[str, float]:
    """Seconds of a step by operation."""
    return {o: (s - before.get(o, 0.0)) / steps for o, s in timeline.shares().items()}


class _SteadyScheduler(Scheduler):
    """Calls `second` before its second step."""

    second: Callable[[], None] | None = None
    _steps = 0

    def next_step(self, now: int) -> Step:
        self._steps += 1
        if self._steps == 2 and self.second:
            self.second()
        return super().next_step(now)


class _NoLink:
    """A lane whose attention takes no time."""

    def begin(self, plan) -> None:
        pass

    def post(self, layer, q, k, v, o) -> None:
        o.zero_()

    def wait(self) -> None:
        pass

    def take(self) -> None:
        pass


class _Prompts:
    """Feed of a lane: rows that are done with their prompt."""

    def __init__(self, load: SteadyLoad):
        lines = range(load.lane_batch, load.lane_batch + load.prompts)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self._rows = [Prompt(line, str(line), [_TOKEN] * load.prompt, params) for line in lines]

    def peek(self) -> Prompt | None:
        return self._rows[-1] if self._rows else None

    def pop(self) -> Prompt:
        return self._rows.pop()

    def refuse(self, prompt, reason) -> None:
        raise IndexError(reason)


class _NoSink:
    def finish(self, request) -> None:
        pass
