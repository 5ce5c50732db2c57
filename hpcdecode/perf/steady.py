"""Lanes in their steady state: so many sequences of one length, each a token a step, through the workers of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI

from hpcdecode import launch
from hpcdecode.attention import LayerShape, PromptAttention, capacity_for, open_store
from hpcdecode.data.tokens import Prompt
from hpcdecode.exchange.base import Share, SLink
from hpcdecode.exchange.mpi import MpiRLink, MpiSLink
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.wire import shared_sizes
from hpcdecode.launch import Rank
from hpcdecode.model import SplitModel
from hpcdecode.sampling.params import SamplingParams
from hpcdecode.schedule.injector import Injector
from hpcdecode.schedule.limits import Limits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.sequence import Sequence
from hpcdecode.schedule.stops import Stops
from hpcdecode.timeline import Timeline
from hpcdecode.workers.r_part import RPart
from hpcdecode.workers.r_rank import Turns, lane_program, serve
from hpcdecode.workers.s_rank import SRank

_FILL = 1024  # random rows that are repeated
_TOKEN = 7


@dataclass(frozen=True)
class Load:
    """batch sequences of `context` tokens over `lanes` lanes. pieces: of an R-rank's work in a layer; messages: send
    the activations as between hosts, not through shared memory."""

    batch: int
    lanes: int
    context: int
    steps: int
    pieces: int = 1
    messages: bool = False

    @property
    def lane_batch(self) -> int:
        return self.batch // self.lanes


class Steady:
    """One rank of a world with one S-rank, rank 0. model: on the S-rank. Every rank calls `run` with the same load."""

    def __init__(self, comm: MPI.Intracomm, me: Rank, shapes: list[LayerShape], model: SplitModel | None):
        self.comm, self.me, self.shapes, self.model = comm, me, shapes, model
        self.parts = comm.size - 1

    def run(self, load: Load) -> list[dict[str, float]]:
        """Seconds of a step by operation, of every rank on every rank; `step` of rank 0 is that of all lanes' batch."""
        timeline, dtype = Timeline(), torch.bfloat16
        slots = Limits(load.lane_batch, 1, 1, 1, None).slots
        sizes = (0, 0) if load.messages else shared_sizes(self.shapes, load.lane_batch, 0, dtype)
        wire = (self.shapes, slots, dtype, sizes, Partition("request", self.parts), load.pieces)
        part = None if self.model else self._part(load, slots, timeline)
        comms = [self.comm.Dup() for _ in range(load.lanes)]
        links: list = [
            MpiRLink(c, *wire, first_slot=slots * lane) if part else MpiSLink(c, *wire) for lane, c in enumerate(comms)
        ]
        launch.gather_all(self.comm, 0, int)  # all are filled
        timeline.enter("other")
        before, turns = timeline.shares(), Turns()
        seconds = 0.0
        if part:
            serve([lane_program(i, link, part, turns) for i, link in enumerate(links)], timeline)
        else:
            seconds = self._run_s(load, links, timeline)
        for link in links:
            link.close()
        own = {o: (s - before.get(o, 0.0)) / load.steps for o, s in timeline.shares().items()}
        return launch.gather_all(self.comm, {**own, "step": seconds / load.steps}, dict[str, float])

    def alone(self, load: Load) -> tuple[float, float]:
        """Seconds of a step of the S-rank and of the slowest R-rank, one side after the other, without an exchange."""
        s = self._most(self._s_work(load)() if self.model else 0.0)
        return s, self._most(0.0 if self.model else self._r_work(load)())

    def at_once(self, load: Load) -> tuple[float, float]:
        """The same with all ranks at work, each for as long as any: what they leave each other of the machine."""
        work = self._s_work(load) if self.model else self._r_work(load)
        launch.gather_all(self.comm, 0, int)
        steps = [work()]
        done = self.comm.Ibarrier()
        while not done.Test():
            steps.append(work())
        mean = sum(steps) / len(steps)
        return self._most(mean if self.model else 0.0), self._most(0.0 if self.model else mean)

    def _most(self, seconds: float) -> float:
        return max(launch.gather_all(self.comm, seconds, float))

    def _s_work(self, load: Load) -> Callable[[], float]:
        """Runs the S-rank's steps when attention takes no time; returns the seconds of one."""
        return lambda: self._run_s(load, [_NoLink()] * load.lanes, Timeline()) / load.steps

    def _r_work(self, load: Load) -> Callable[[], float]:
        """Runs a step's attention on this R-rank when its rows are there at once; returns its seconds."""
        timeline = Timeline()
        slots = Limits(load.lane_batch, 1, 1, 1, None).slots
        part = self._part(load, slots, timeline)
        plan = Plan(decode=self._decode(load))
        shares = [Share(plan, self.comm.rank - 1, slots * lane) for lane in range(load.lanes)]
        widest = max(s.row_columns for s in self.shapes)
        rows = torch.randn(len(shares[0].whole.decode_rows), widest).bfloat16()

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

    def _decode(self, load: Load) -> np.ndarray:
        i = np.arange(load.lane_batch)
        return np.stack([i % self.parts, i], axis=1).astype(np.int32)

    def _run_s(self, load: Load, links: list[SLink], timeline: Timeline) -> float:
        injectors = [self._injector(lane, load) for lane in range(load.lanes)]
        prompts = PromptAttention(self.shapes, dtype="bfloat16")
        worker = SRank(self.model, self.shapes, links, injectors, _NoSink(), Stops(), prompts, timeline)
        worker.run(lambda: None)
        return worker.seconds

    def _injector(self, lane: int, load: Load) -> Injector:
        """With all its sequences decoding, and none to come."""
        placement = Placement([1 << 40] * self.parts, 1, load.lanes)
        limits = Limits(load.lane_batch, load.steps, load.steps, 1, None)
        injector = Injector(lane, _NoFeed(), placement, limits, Stops())
        params = SamplingParams(ignore_eos=True)
        for (rank, slot), line in zip(self._decode(load).tolist(), range(load.lane_batch), strict=True):
            prompt = Prompt(line, str(line), [_TOKEN] * load.context, params)
            sequence = Sequence(prompt, load.steps + 1, lane, rank=rank, slot=slot, prefilled=load.context)
            sequence.generated.append(_TOKEN)
            sequence.family.append(sequence)
            injector.families[line] = sequence.family
            injector.decoding.append(sequence)
            placement.add(sequence)
        return injector

    def _part(self, load: Load, slots: int, timeline: Timeline) -> RPart:
        """With the sequences' K and V in its store."""
        held = load.batch // self.parts + load.lanes
        capacity = held * (load.context + load.steps + 128)
        store = open_store(
            self.shapes,
            kv_dtype="bfloat16",
            capacity_tokens=max(capacity, capacity_for(self.shapes, "bfloat16", 1 << 20)),
            max_sequences=slots * load.lanes,
            threads=self.me.threads,
            cpus=self.me.cpus if self.me.pinned else None,
        )
        random = torch.randn(_FILL, max(s.kv_columns for s in self.shapes)).bfloat16()
        for lane in range(load.lanes):
            for slot in self._decode(load)[self.comm.rank - 1 :: self.parts, 1] + slots * lane:
                for start in range(0, load.context, _FILL):
                    count = min(_FILL, load.context - start)
                    store.extend([slot], [count])
                    for layer, shape in enumerate(self.shapes):
                        store.append(layer, [slot], [count], random[:count, : shape.kv_columns].contiguous())
        return RPart(store, [None] * len(self.shapes), timeline)


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


class _NoFeed:
    def peek(self) -> None:
        return None

    def pop(self) -> Prompt:
        raise IndexError

    def refuse(self, prompt, reason) -> None:
        raise IndexError


class _NoSink:
    def finish(self, family) -> None:
        pass
