"""The S-rank: the token-wise slices of its lanes in turn, and the sampling at the end of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import count
from time import time
from typing import Protocol

import torch
from torch import Tensor

from hpcdecode.engine.choice import executors
from hpcdecode.engine.confirmation import confirmed
from hpcdecode.engine.desk import RankReport
from hpcdecode.engine.executors import StepEnd
from hpcdecode.engine.group_lane import GroupLane, OneMember
from hpcdecode.engine.inputs import Inputs, take_logprobs
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.prefill_ranks import PrefillLane
from hpcdecode.engine.programs import Program, Waiting, serve
from hpcdecode.engine.prompt_lanes import PromptLanes
from hpcdecode.engine.rounds import LaneRounds, RowArrival, SwapReturn
from hpcdecode.errors import InvariantViolation
from hpcdecode.exchange.base import SLink
from hpcdecode.model import SplitModel
from hpcdecode.requests.prompt import Unfinished
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.sampling.beam_search import advance_beams
from hpcdecode.sampling.grammars import Grammars
from hpcdecode.sampling.sampler import sample
from hpcdecode.schedule.admission import Feed
from hpcdecode.schedule.pace import Pace
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.step import Step
from hpcdecode.system.memory import give_back
from hpcdecode.system.timeline import Timeline


class Sink(Protocol):
    """Where finished rows go."""

    def finish(self, request: Request) -> None:
        """Take a request whose sequences are all finished."""

    def last_report(self, unfinished: list[Unfinished]) -> RankReport:
        """Return what there is to hand over if the work ends early; unfinished: the sequences in flight."""


class SRank:
    """Runs the lanes of one S-rank until their schedulers are exhausted or `stopping` is set.

    While a lane waits for its attention, the slices of the others run. Step s of a lane begins once those of the others
    have begun, in the order of the lanes: the placement counts on it (`Placement.fits`).

    Args:
        model: with its weights on this rank, or of a group the first member's part of them.
        links: of the lanes.
        schedulers: of the lanes.
        sink: takes the finished requests.
        stops: what ends a sequence.
        prompts: attends from prompt tokens, and holds their K and V meanwhile.
        timeline: of this rank.
        grammars: needed if rows have structured outputs.
        groups: the lanes' other members, if there are any.
        sampled: takes note of the sequences that a step gave tokens.
        max_gap: seconds between two tokens of a sequence that prompts of others should take at most; None for any.
        apart: the lanes' prompts, if ranks prefill them that do nothing else.

    Attributes:
        stopping: set it to end after the steps under way.
        seconds: that `run` took; prefill_seconds and decode_seconds: of prompt tokens, and of those that follow.
        steps, tokens, decode_tokens: lane steps, tokens that were sampled, tokens that were fed back.
        peak_prefill_tokens: the most prompt tokens whose K and V were held here.
        peak_load: the most tokens that the sequences of all lanes attended to in a step.
    """

    def __init__(
        self,
        model: SplitModel,
        links: Sequence[SLink],
        schedulers: Sequence[Scheduler],
        sink: Sink,
        stops: Stops,
        prompts: PromptKvCache,
        timeline: Timeline,
        grammars: Grammars | None = None,
        groups: Sequence[GroupLane] = (),
        sampled: Callable[[Sequence[SequenceState]], None] | None = None,
        max_gap: float | None = None,
        apart: Sequence[PrefillLane] = (),
    ):
        self.model, self.links, self.schedulers = model, links, schedulers
        self.sink, self.stops, self.timeline, self.grammars = sink, stops, timeline, grammars
        self.sampled, self.prompt_kv = sampled, prompts
        self.pace = Pace(max_gap, schedulers[0].limits.prefill_tokens, len(schedulers))
        self.groups = groups or [OneMember()] * len(links)
        self.executors = executors(model, links, self.groups, prompts, timeline)
        self.apart, self.stopping = PromptLanes(self, apart), False
        self.seconds = self.prefill_seconds = self.decode_seconds = 0.0
        self.steps = self.tokens = self.decode_tokens = self.peak_prefill_tokens = self.peak_load = 0
        self._rounds = LaneRounds(len(links))
        self._plans = self._waits = self._prompt_tokens = 0

    def run(self, between: Callable[[], None]) -> None:
        """Generate until done; `between` is called after every round of the lanes."""
        enter = self.timeline.enter
        enter("desk")
        before = self.timeline.seconds()
        self.timeline.lap()

        def duties() -> None:
            enter("desk")
            between()

        try:
            with torch.inference_mode():
                programs = [self._lane(*one) for one in zip(count(), self.links, self.schedulers, strict=False)]
                serve([*programs, *self.apart.programs()], self.timeline, duties, oldest_first=True)
        finally:
            enter("other")
            self.seconds = self.timeline.seconds() - before

    @property
    def tokens_in_flight(self) -> int:
        """Return the tokens that KV caches keep of the sequences in flight."""
        return sum(scheduler.tokens_in_flight for scheduler in self.schedulers)

    def unfinished(self) -> list[Unfinished]:
        """Return what the requests in flight have generated, finished samples included.

        Beam searches and sequences with an error are left out: they start over.
        """
        sequences = (s for scheduler in self.schedulers for r in scheduler.requests.values() for s in r.sequences)
        return [s.unfinished() for s in sequences if s.generated and s.beams is None and s.error is None]

    def cancel(self, line: int) -> None:
        """Let the sequences of a row, if it is in flight here, end with their next tokens."""
        for scheduler in self.schedulers:
            if request := scheduler.requests.get(line):
                request.cancelled = True

    def _lane(self, lane: int, link: SLink, scheduler: Scheduler) -> Program:
        """Run one lane: schedule, execute, sample, update."""
        enter = self.timeline.enter
        while True:
            yield "idle", self._rounds.turn(lane)
            yield from self.apart.must_wait(lane, self._rounds.following(lane))
            enter("plan", lane)
            if self.stopping or scheduler.exhausted():
                break
            scheduler.tiers.note(link.take_swapped())
            step = scheduler.next_step(self._rounds.begin(lane))
            self.peak_load = max(self.peak_load, sum(s.load for s in self.schedulers))
            forgotten = scheduler.take_forgotten()
            plan = self.apart.order(lane, step.plan, forgotten)
            if not plan.runs_model:  # waiting for room that another lane's sequences hold, or for prompts elsewhere
                if plan.changes_slots:
                    self.announce(lane, plan, None, forgotten)
                if self._empty():
                    yield "idle", RowArrival(self._feed)
                    self.timeline.lap()
                elif self._returning:
                    yield "wait", SwapReturn(self.links, self.schedulers)
                elif not self.apart.under_way:
                    self._count_wait()
                elif not any(other.decoding for other in self.schedulers):
                    yield "wait", self.apart.ends
                continue
            self._waits = 0
            step.stamp_queued(time())
            inputs = Inputs(step, self.model.device, forgotten, states=self.model.hands_hidden)
            self.announce(lane, plan, inputs, forgotten)
            executor = next(e for e in self.executors if e.suits(inputs.model))
            last = yield from executor.run(lane, link, inputs.model)
            end, tokens = StepEnd(self.model, self.groups[lane], last, self.timeline, lane), list[int]()
            if inputs.model.logits_parts:
                tokens = yield from self.sample(lane, inputs, end.logits)
            inputs.hidden, inputs.states = end.hidden, (yield from end.states(inputs.model.state_part))
            enter("commit", lane)
            self._finish_step(scheduler, step, inputs, tokens)
        self._rounds.leave(lane)
        plan = scheduler.stop_plan()
        self.announce(lane, plan, None, scheduler.take_forgotten())
        self.apart.close(lane, plan)

    def _empty(self) -> bool:
        """Return whether no lane has anything to do until a row comes."""
        busy = any(scheduler.active or scheduler.admission.waiting for scheduler in self.schedulers)
        return not busy and self._feed.peek() is None

    @property
    def _returning(self) -> bool:
        """Return whether K and V of any sequence are being brought back from tiers."""
        return any(scheduler.tiers.returning for scheduler in self.schedulers)

    @property
    def _feed(self) -> Feed:
        return self.schedulers[0].admission.feed

    def _count_wait(self) -> None:
        """Raise InvariantViolation if all lanes have waited for longer than any schedule has them wait."""
        self._waits += 1
        steps = max(scheduler.limits.period for scheduler in self.schedulers) + 2
        if self._waits > len(self.schedulers) * steps:
            raise InvariantViolation(
                "a lane waits only for room that others hold",
                f"no lane has run for {steps} steps, and rows are left ({self.tokens_in_flight} tokens in flight)",
            )

    def announce(self, lane: int, plan: Plan, inputs: Inputs | None, forgotten: Sequence[int]) -> None:
        """Tell the lane's R-ranks and the other members what to do; drop prefixes if no model runs."""
        numbered = self.numbered(plan)
        self.groups[lane].order(numbered, inputs.on_host if inputs else None, forgotten)
        self.links[lane].send_plan(numbered)
        if inputs is None:
            self.prompt_kv.finish((), forgotten)

    def numbered(self, plan: Plan) -> Plan:
        """Return a plan with the next number."""
        self._plans += 1
        return dataclasses.replace(plan, number=self._plans - 1)

    def sample(
        self, lane: int, inputs: Inputs, logits_of: Callable[[slice, bool], Waiting[Tensor]]
    ) -> Waiting[list[int]]:
        """Return the next token of each of a step's sampled sequences; any token of those that are scored."""
        kept = []
        for part in inputs.model.logits_parts:
            logits = yield from logits_of(part, inputs.model.largest)
            if logits.dim() == 1:
                inputs.keep(logits)
                return inputs.select(logits).tolist()
            self.timeline.enter("sample", lane)
            inputs.take_asked(logits, part)
            kept.append(inputs.drawn_from(logits, part))
        whole = kept[0] if len(kept) == 1 else torch.cat(kept)
        inputs.keep(whole)
        logits = inputs.select(whole)
        drawing = inputs.drawing
        tokens = sample(logits, drawing, self.stops.eos, self.grammars) if drawing else []
        advance_beams(logits, drawing)
        take_logprobs(logits, drawing, tokens)
        return inputs.spread(tokens)

    def take_tokens(self, scheduler: Scheduler, step: Step, tokens: list[int]) -> None:
        """Give the step's sequences their tokens, and hand in the requests that are finished."""
        now = time()
        step.stamp_first(now)
        self._hand_in(scheduler.update(step, tokens), step.sampled, now)

    def _hand_in(self, finished: Sequence[Request], sequences: Sequence[SequenceState], now: float) -> None:
        """Hand in requests that are finished, and tell the new tokens of sequences."""
        for sequence in sequences:
            if sequence.finish_reason is not None:
                sequence.times.finished = now
        if self.sampled is not None:
            self.sampled(sequences)
        for request in finished:
            self.sink.finish(request)
        self.tokens += len(sequences)

    def _finish_step(self, scheduler: Scheduler, step: Step, inputs: Inputs, tokens: list[int]) -> None:
        before = self.tokens
        self.take_tokens(scheduler, step, tokens)
        for sequences, more in confirmed(step, inputs, self.stops, self.grammars):
            self._hand_in(scheduler.confirm(sequences, more), sequences, time())
        inputs.hand_hidden(scheduler.speculation)
        scheduler.speculation.settle(step.decode)
        self.steps += 1
        self._count_seconds(scheduler, step, self.tokens - before)
        self.peak_prefill_tokens = max(self.peak_prefill_tokens, self.prompt_kv.tokens)
        if step.prefill and scheduler.all_prefilled():
            self.prompt_kv.shrink()
            give_back()

    def _count_seconds(self, scheduler: Scheduler, step: Step, tokens: int) -> None:
        """Count the time since any lane's last step ended for this step, and for all of its tokens alike."""
        seconds, decodes, prompts = self.timeline.lap(), len(step.plan.decode), sum(c.count for c in step.prefill)
        self.pace.observe(seconds, prompts, decodes)
        if not prompts:
            scheduler.speculation.observe(seconds, decodes, tokens)
        for scheduler in self.schedulers:
            scheduler.admission.policy.prefill_tokens = self.pace.tokens
        self._prompt_tokens += prompts
        of_decodes = seconds * decodes / (decodes + prompts)
        self.decode_seconds += of_decodes
        self.prefill_seconds += seconds - of_decodes
        self.decode_tokens += decodes
        if swaps := self.schedulers[0].tiers.swaps:
            swaps.prefill_seconds = self.prefill_seconds / max(self._prompt_tokens, 1)
