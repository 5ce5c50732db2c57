"""The S-rank: the token-wise slices of its lanes in turn, and the sampling at the end of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from time import time
from typing import Protocol

import torch

from hpcdecode.engine.choice import executors
from hpcdecode.engine.desk import RankReport
from hpcdecode.engine.executors import LastSliceInput
from hpcdecode.engine.group_lane import GroupLane, OneMember
from hpcdecode.engine.inputs import Inputs, take_logprobs
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.programs import Program, Waiting, serve
from hpcdecode.engine.rounds import LaneRounds, RowArrival
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
        groups: the lanes' other members; None if there are none.
        sampled: takes note of the sequences that a step gave tokens.
        max_gap: seconds between two tokens of a sequence that prompts of others should take at most; None for any.

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
        groups: Sequence[GroupLane] | None = None,
        sampled: Callable[[Sequence[SequenceState]], None] | None = None,
        max_gap: float | None = None,
    ):
        self.model, self.links, self.schedulers = model, links, schedulers
        self.sink, self.stops, self.timeline, self.grammars = sink, stops, timeline, grammars
        self.sampled = sampled
        self.pace = Pace(max_gap, schedulers[0].limits.prefill_tokens, len(schedulers))
        self.prompt_kv = prompts
        self.groups = [OneMember()] * len(links) if groups is None else groups
        self.executors = executors(model, links, self.groups, self.prompt_kv, timeline)
        self.stopping = False
        self.seconds = self.prefill_seconds = self.decode_seconds = 0.0
        self.steps = self.tokens = self.decode_tokens = self.peak_prefill_tokens = self.peak_load = 0
        self._rounds = LaneRounds(len(links))
        self._plans = self._waits = 0

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
                each = zip(range(len(self.links)), self.links, self.schedulers, strict=True)
                serve([self._lane(*one) for one in each], self.timeline, duties, oldest_first=True)
        finally:
            enter("other")
            self.seconds = self.timeline.seconds() - before

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that were not prefilled, because other rows begin with them."""
        return sum(scheduler.shared_tokens for scheduler in self.schedulers)

    @property
    def preemptions(self) -> int:
        """Return how often sequences gave up their room."""
        return sum(scheduler.preemptions for scheduler in self.schedulers)

    @property
    def preempted_tokens(self) -> int:
        """Return the tokens whose K and V were dropped so, and were computed again."""
        return sum(scheduler.preempted_tokens for scheduler in self.schedulers)

    @property
    def tokens_in_flight(self) -> int:
        """Return the tokens in KV caches of the sequences in flight."""
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
            enter("plan", lane)
            if self.stopping or scheduler.exhausted():
                break
            step = scheduler.next_step(self._rounds.begin(lane))
            self.peak_load = max(self.peak_load, sum(s.load for s in self.schedulers))
            forgotten = scheduler.take_forgotten()
            if not step.plan.runs_model:  # waiting for room that another lane's sequences hold
                if step.plan.changes_slots:
                    self._announce(lane, step.plan, None, forgotten)
                if self._empty():
                    yield "idle", RowArrival(self._feed)
                    self.timeline.lap()
                else:
                    self._count_wait()
                continue
            self._waits = 0
            self._stamp_queued(step)
            inputs = Inputs(step, self.model.device, forgotten)
            self._announce(lane, step.plan, inputs, forgotten)
            executor = next(e for e in self.executors if e.suits(inputs.model))
            last = yield from executor.run(lane, link, inputs.model)
            tokens: list[int] = []
            if len(inputs.model.tokens.logits_indices):
                tokens = yield from self._sample(lane, step, inputs, last)
            enter("commit", lane)
            self._finish_step(scheduler, step, tokens)
        self._rounds.leave(lane)
        plan = scheduler.stop_plan()
        self._announce(lane, plan, None, scheduler.take_forgotten())

    def _empty(self) -> bool:
        """Return whether no lane has anything to do until a row comes."""
        busy = any(scheduler.active or scheduler.admission.waiting for scheduler in self.schedulers)
        return not busy and self._feed.peek() is None

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

    def _announce(self, lane: int, plan: Plan, inputs: Inputs | None, forgotten: Sequence[int]) -> None:
        """Tell the lane's R-ranks and the other members what to do; drop prefixes if no model runs."""
        numbered = dataclasses.replace(plan, number=self._plans)
        self._plans += 1
        self.groups[lane].order(numbered, inputs.on_host if inputs else None, forgotten)
        self.links[lane].send_plan(numbered)
        if inputs is None:
            self.prompt_kv.finish((), forgotten)

    def _stamp_queued(self, step: Step) -> None:
        for chunk in step.prefill:
            for sequence in chunk.sequence.with_forks:
                sequence.times.queued = sequence.times.queued or time()

    def _sample(self, lane: int, step: Step, inputs: Inputs, last: LastSliceInput) -> Waiting[list[int]]:
        """Return the next token of each of the step's sampled sequences; any token of those that are scored."""
        group, kept = self.groups[lane], []
        for part in inputs.model.logits_parts:
            self.timeline.enter("logits", lane)
            head = yield from group.summed(self.model.start_last(*last, part))
            largest = (yield from group.largest(head)) if inputs.model.largest else None
            if largest is not None:
                return inputs.select(largest).tolist()
            logits = yield from group.logits(head)
            self.timeline.enter("sample", lane)
            inputs.take_asked(logits, part)
            kept.append(inputs.drawn_from(logits, part))
        logits = inputs.select(kept[0] if len(kept) == 1 else torch.cat(kept))
        drawing = inputs.drawing
        tokens = sample(logits, drawing, self.stops.eos, self.grammars) if drawing else []
        advance_beams(logits, drawing)
        take_logprobs(logits, drawing, tokens)
        return inputs.spread(tokens)

    def _finish_step(self, scheduler: Scheduler, step: Step, tokens: list[int]) -> None:
        now = time()
        for chunk in step.prefill:
            if chunk.completes:
                for sequence in chunk.sequence.with_forks:
                    sequence.times.first_token = sequence.times.first_token or now
        finished = scheduler.update(step, tokens)
        for sequence in step.sampled:
            if sequence.finish_reason is not None:
                sequence.times.finished = now
        if self.sampled is not None:
            self.sampled(step.sampled)
        for request in finished:
            self.sink.finish(request)
        self.steps += 1
        self.tokens += len(tokens)
        self._count_seconds(step)
        self.peak_prefill_tokens = max(self.peak_prefill_tokens, self.prompt_kv.tokens)
        if step.prefill and scheduler.all_prefilled():
            self.prompt_kv.shrink()
            give_back()

    def _count_seconds(self, step: Step) -> None:
        """Count the time since any lane's last step ended for this step, and for all of its tokens alike."""
        seconds, decodes, prompts = self.timeline.lap(), len(step.decode), sum(c.count for c in step.prefill)
        self.pace.observe(seconds, prompts, decodes)
        for scheduler in self.schedulers:
            scheduler.admission.policy.prefill_tokens = self.pace.tokens
        of_decodes = seconds * decodes / (decodes + prompts)
        self.decode_seconds += of_decodes
        self.prefill_seconds += seconds - of_decodes
        self.decode_tokens += decodes
