"""The S-rank: the token-wise slices of every lane in rotation, and the sampling at the end of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from time import time
from typing import Protocol

import torch

from hpcdecode.engine.desk import RankReport
from hpcdecode.engine.executors import LastSliceInput, executors
from hpcdecode.engine.inputs import Inputs, take_logprobs
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.errors import InvariantViolation
from hpcdecode.exchange.base import SLink
from hpcdecode.model import SplitModel
from hpcdecode.requests.prompt import Unfinished
from hpcdecode.requests.sequence import Request
from hpcdecode.requests.stops import Stops
from hpcdecode.sampling.beam_search import advance_beams
from hpcdecode.sampling.grammars import Grammars
from hpcdecode.sampling.sampler import sample
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

    A turn of a lane ends with the post of an attention. The wait for it is the start of its next turn, so the other
    lanes' slices run meanwhile. Lane step s begins at turn s * layers, for every lane.

    Args:
        model: with its weights on this rank.
        links: of the lanes.
        schedulers: of the lanes.
        sink: takes the finished requests.
        stops: what ends a sequence.
        prompts: attends from prompt tokens, and holds their K and V meanwhile.
        timeline: of this rank.
        grammars: needed if rows have structured outputs.

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
    ):
        self.model, self.links, self.schedulers = model, links, schedulers
        self.sink, self.stops, self.timeline, self.grammars = sink, stops, timeline, grammars
        self.prompt_kv = prompts
        self.executors = executors(model, links, self.prompt_kv, timeline)
        self.stopping = False
        self.seconds = self.prefill_seconds = self.decode_seconds = 0.0
        self.steps = self.tokens = self.decode_tokens = self.peak_prefill_tokens = self.peak_load = 0
        self._layers = len(model.attends)
        self._turn = self._plans = self._waits = 0

    def run(self, between_turns: Callable[[], None]) -> None:
        """Generate until done; `between_turns` is called once a rotation of the lanes."""
        self.timeline.enter("desk")
        before = self.timeline.seconds()
        self.timeline.lap()
        try:
            with torch.inference_mode():
                each = zip(range(len(self.links)), self.links, self.schedulers, strict=True)
                lanes = [self._lane(*one) for one in each]
                while lanes:
                    turns = [next(lane, 0) for lane in lanes]
                    lanes = [lane for lane, count in zip(lanes, turns, strict=True) if count]
                    self._turn += max(turns)
                    self.timeline.enter("desk")
                    between_turns()
        finally:
            self.timeline.enter("other")
            self.seconds = self.timeline.seconds() - before

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that were not prefilled, because other rows begin with them."""
        return sum(scheduler.shared_tokens for scheduler in self.schedulers)

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

    def _lane(self, lane: int, link: SLink, scheduler: Scheduler) -> Generator[int, None, None]:
        """Run one lane: schedule, execute, sample, update. Yield the turns that went by."""
        enter = self.timeline.enter
        while not self.stopping and not scheduler.exhausted():
            enter("plan", lane)
            step = scheduler.next_step(self._turn // self._layers)
            self.peak_load = max(self.peak_load, sum(s.load for s in self.schedulers))
            if step.plan.changes_slots or step.plan.runs_model:
                self._announce(link, step.plan)
            if not step.plan.runs_model:
                self._count_wait()
                yield 1  # waiting for room that another lane's sequences hold
                continue
            self._waits = 0
            self._stamp_queued(step)
            inputs = Inputs(step, self.model.device)
            executor = next(e for e in self.executors if e.suits(step))
            last = yield from executor.run(lane, link, step, inputs)
            tokens = self._sample(lane, step, inputs, last) if len(inputs.logits_indices) else []
            enter("commit", lane)
            self._finish_step(scheduler, step, tokens)
        self._announce(link, scheduler.stop_plan())
        self.prompt_kv.finish(())

    def _count_wait(self) -> None:
        """Raise InvariantViolation if all lanes have waited for longer than any schedule has them wait."""
        self._waits += 1
        steps = max(scheduler.limits.period for scheduler in self.schedulers) + 2
        if self._waits > len(self.schedulers) * self._layers * steps:
            raise InvariantViolation(
                "a lane waits only for room that others hold",
                f"no lane has run for {steps} steps, and rows are left ({self.tokens_in_flight} tokens in flight)",
            )

    def _announce(self, link: SLink, plan: Plan) -> None:
        link.send_plan(dataclasses.replace(plan, number=self._plans))
        self._plans += 1

    def _stamp_queued(self, step: Step) -> None:
        for chunk in step.prefill:
            for sequence in chunk.sequence.with_forks:
                sequence.times.queued = sequence.times.queued or time()

    def _sample(self, lane: int, step: Step, inputs: Inputs, last: LastSliceInput) -> list[int]:
        """Return the next token of each of the step's sampled sequences."""
        self.timeline.enter("logits", lane)
        argmax = self.model.argmax(*last) if inputs.argmax_suffices else None
        if argmax is not None:
            return inputs.select(argmax).tolist()
        logits = self.model.logits(*last)
        inputs.take_prompt_logprobs(logits)
        logits = inputs.select(logits)
        self.timeline.enter("sample", lane)
        tokens = sample(logits, step.sampled, self.stops.eos, self.grammars)
        advance_beams(logits, step.sampled)
        take_logprobs(logits, step.sampled, tokens)
        return tokens

    def _finish_step(self, scheduler: Scheduler, step: Step, tokens: list[int]) -> None:
        now = time()
        for chunk in step.prefill:
            if chunk.completes:
                for sequence in chunk.sequence.with_forks:
                    sequence.times.first_token = now
        finished = scheduler.update(step, tokens)
        for sequence in step.sampled:
            if sequence.finish_reason is not None:
                sequence.times.finished = now
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
        of_decodes = seconds * decodes / (decodes + prompts)
        self.decode_seconds += of_decodes
        self.prefill_seconds += seconds - of_decodes
        self.decode_tokens += decodes
