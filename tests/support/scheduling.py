"""Feeds and a machine of KV caches to run the scheduler with, without a model."""

from __future__ import annotations

from collections import deque

import numpy as np

from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.reach import reach_of
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import footprint_for
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.exchange.shares import Share
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.optimistic import OptimisticPlacement
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.plan import Plan, wire_length
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.speculation import is_right
from hpcdecode.schedule.step import Step
from hpcdecode.system.timeline import Timeline
from tests.support.random_guesses import MOST, RandomGuesses


class ListFeed:
    def __init__(self, prompts):
        self.prompts, self.refused = deque(prompts), []

    def peek(self):
        return self.prompts[0] if self.prompts else None

    def at_hand(self):
        return self.peek()

    def exhausted(self):
        return self.peek() is None

    def pop(self):
        return self.prompts.popleft()

    def refuse(self, prompt, reason):
        self.prompts.popleft()
        self.refused.append((prompt.line, reason))


def prompts(lengths):
    """(prompt tokens, max_tokens) of each row."""
    return [
        Prompt(line=i + 1, id=str(i), token_ids=[1] * p, params=SamplingParams(max_tokens=n, ignore_eos=True))
        for i, (p, n) in enumerate(lengths)
    ]


SHAPE = LayerShape(kv_heads=1, k_dim=2, v_dim=2, q_heads=1, scale=1.0)


class Machine:
    """The KV stores of R-ranks, with nothing written to them, and an S-rank that runs the lanes in rotation.

    drained: step from which on lanes stop, whatever is in flight.
    guesses: share of tokens guessed ahead that are right; None guesses none.
    """

    def __init__(
        self,
        feed,
        *,
        batch,
        period,
        steps,
        capacity,
        block=1,
        lanes=1,
        prefill_tokens=64,
        stops=None,
        shared=0,
        speeds=None,
        placement=Placement,
        tiers=None,
        drained=None,
        guesses=None,
        shapes=(SHAPE,),
        reach=None,
        **kind,
    ):
        self.stops = stops or {}  # (line, sample, position) -> token
        footprint, capacity = (
            footprint_for(shapes, "float32", block, 0, windowed=True, lookahead=0 if guesses is None else MOST),
            [c // block * block for c in capacity],
        )
        self.placement = placement(capacity, footprint, lanes, speeds, reach_of(shapes) if reach is None else reach)
        limits = LaneLimits(batch, period, steps, prefill_tokens, None, shared, **kind)
        swaps = tiers.swaps(len(capacity), footprint) if tiers else None
        self.tiers = tiers
        guessed = None if guesses is None else RandomGuesses(guesses, self._token, self.placement)
        own = (feed, self.placement, limits, Stops(), swaps, guessed)
        self.schedulers = [Scheduler(lane, *own) for lane in range(lanes)]
        sizes = {"kv_dtype": "float32", "max_sequences": limits.slots * lanes, "block_tokens": block}
        sizes |= {"windowed": True, "lookahead": 0 if guesses is None else MOST}
        self.stores = [open_kv_cache(shapes, capacity_tokens=c, **sizes) for c in capacity]
        self.parts = [
            AttentionWorker(store, [None], Timeline(), swap=tiers.open(store) if tiers else None)
            for store in self.stores
        ]
        self.now, self.done, self.loads, self.steps = 0, [], [], []
        self.lengths = []  # by step of a lane and R-rank: tokens of the sequences that decode
        self.stopped, self.waits, self.drained = set(), 0, drained
        self.first_slot = limits.slots  # of the second lane

    def run(self, most=10_000):
        while len(self.stopped) < len(self.schedulers):
            for lane, scheduler in enumerate(self.schedulers):
                self._step(lane, scheduler)
            self.now += 1
            assert self.now < most, "the job does not end"
        return self

    def _step(self, lane, scheduler):
        if lane in self.stopped:
            return
        if scheduler.exhausted() or (self.drained is not None and self.now >= self.drained):
            self.stopped.add(lane)
            step = Step(scheduler.stop_plan(), [], [])
        else:
            if self.tiers:
                scheduler.tiers.note(self.tiers.due(lane, self.now))
            step = scheduler.next_step(self.now)
            waits = not (step.plan.runs_model or any(s.tiers.returning for s in self.schedulers))
            self.waits = self.waits + 1 if waits else 0
            assert self.waits <= len(self.schedulers) * (scheduler.limits.period + 2)  # as in SRank
        self._play(lane, scheduler, step)

    def _play(self, lane, scheduler, step):
        """Carry a step out: its plan on every R-rank, then its tokens."""
        plan, first = self._apply(lane, step.plan), lane * self.first_slot
        self.placement.check()
        if isinstance(self.placement, OptimisticPlacement):
            for store, claimed in zip(self.stores, self.placement.claimed, strict=True):
                assert store.used_tokens <= -(-claimed // self.placement.footprint.groups)
        self.loads.append(sum(s.length + 1 for s in scheduler.decoding))
        self.steps.append(plan)
        ranks = range(len(self.parts))
        self.lengths.append([[s.length + 1 for s in step.decode if s.rank == rank] for rank in ranks])
        tokens = [self._token(s, len(s.generated)) for s in step.sampled]
        for sequence in step.decode:
            drafted = len(sequence.draft.tokens)
            assert self.stores[sequence.rank].length(first + sequence.slot) == sequence.length + 1 + drafted
        self.done += [s for r in scheduler.update(step, tokens) for s in r.sequences]
        self._confirm(scheduler, step)

    def _token(self, sequence, made):
        """The next token of a sequence that has so many."""
        return self.stops.get((sequence.prompt.line, sequence.sample, made), 7)

    def _confirm(self, scheduler, step):
        """Give sequences tokens for as long as those of their drafts are right."""
        place, going = 0, step.decode
        while going := [s for s in going if is_right(s, place)]:
            place += 1
            tokens = [self._token(s, len(s.generated)) for s in going]
            self.done += [s for r in scheduler.confirm(going, tokens) for s in r.sequences]
        scheduler.speculation.settle(step.decode)

    def _apply(self, lane, plan):
        """Return the plan as it comes over the wire, once every R-rank has carried it out."""
        wire = np.zeros(wire_length(self.first_slot, len(self.stores)), np.int32)
        plan.encode(wire)
        plan = Plan.decode_from(wire)
        for rank, part in enumerate(self.parts):
            part.apply(lane, Share(plan, rank, lane * self.first_slot))  # raises KvCapacityError where it does not fit
            if self.tiers:
                self.tiers.apply(lane, part, plan, rank, self.now)
        return plan

    @property
    def reads(self):
        """By step of a lane and R-rank: tokens that are attended to, and sequences."""
        return [[(sum(lengths), len(lengths)) for lengths in by_rank] for by_rank in self.lengths]

    def balance(self, reach):
        """How level the R-ranks are in what they read: the mean over the largest, over all steps."""
        reads = [[sum(reach.over(n, n) for n in lengths) for lengths in by_rank] for by_rank in self.lengths]
        return sum(map(sum, reads)) / len(self.parts) / sum(map(max, reads))

    def require_empty(self):
        assert not any(self.placement._held) and not any(self.placement._decoding)
        for store in self.stores:
            store.check()
            assert store.used_tokens == 0
        for part in self.parts:
            part.check()
        for scheduler in self.schedulers:
            assert not scheduler.tiers.returning and not (scheduler.tiers.swaps and scheduler.tiers.swaps.held)
            assert len(scheduler.slots) == scheduler.limits.slots and not scheduler.requests
            assert not scheduler.prefixes.live
