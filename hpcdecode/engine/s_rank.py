"""The S-rank: the token-wise slices of every lane in rotation, and the sampling at the end of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from time import time
from typing import Protocol

import torch
from torch import Tensor

from hpcdecode.attention.base import LayerShape
from hpcdecode.attention.prefill import PromptAttention
from hpcdecode.attention.prefill_torch import TorchPrompts
from hpcdecode.engine.desk import RankReport
from hpcdecode.engine.inputs import Inputs, take_logprobs
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.errors import InvariantViolation
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.local import walk_over
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
        """What there is to hand over where the work ends before its end. unfinished: the sequences in flight."""


class SRank:
    """Runs the lanes of one S-rank until their schedulers are exhausted or `stopping` is set.

    A turn of a lane ends with the post of an attention; the wait for it is the start of its next turn, so the
    other lanes' slices run meanwhile. Lane step s begins at turn s * layers, for every lane.
    """

    def __init__(
        self,
        model: SplitModel,
        shapes: Sequence[LayerShape],
        links: Sequence[SLink],
        schedulers: Sequence[Scheduler],
        sink: Sink,
        stops: Stops,
        prompts: PromptAttention | TorchPrompts,
        timeline: Timeline,
        grammars: Grammars | None = None,
    ):
        self.model, self.shapes, self.links, self.schedulers = model, shapes, links, schedulers
        self.sink, self.stops, self.timeline, self.grammars = sink, stops, timeline, grammars
        self.prefill = PromptKvCache(prompts)
        self.walk = walk_over(model, links)  # takes the steps that it suits
        self.stopping = False
        self.seconds = 0.0
        self.prefill_seconds = self.decode_seconds = 0.0  # of prompt tokens, and of those that follow
        self.steps = self.tokens = self.decode_tokens = self.peak_prefill_tokens = 0
        self.peak_load = 0  # tokens that the sequences of all lanes attend to in a step
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
                    lanes = [lane for lane in lanes if next(lane, False)]
                    self._turn += 1
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
        return sum(scheduler.tokens_in_flight for scheduler in self.schedulers)

    def unfinished(self) -> list[Unfinished]:
        """What the rows in flight have generated, finished samples included; a beam search would start over.

        What is no result is left out: it is generated again, to be found so again.
        """
        sequences = (s for scheduler in self.schedulers for r in scheduler.requests.values() for s in r.sequences)
        return [s.unfinished() for s in sequences if s.generated and s.beams is None and s.error is None]

    def _lane(self, lane: int, link: SLink, scheduler: Scheduler) -> Generator[bool, None, None]:
        enter = self.timeline.enter
        while not self.stopping and not scheduler.exhausted():
            enter("plan", lane)
            step = scheduler.next_step(self._turn // len(self.shapes))
            self.peak_load = max(self.peak_load, sum(i.load for i in self.schedulers))
            if step.plan.changes_slots or step.plan.runs_model:
                self._announce(link, step.plan)
            if not step.plan.runs_model:
                self._count_wait()
                yield True  # waiting for room that another lane's sequences hold
                continue
            self._waits = 0
            inputs = Inputs(step, self.model.device)
            o, context = yield from self._forward(lane, link, step, inputs)
            tokens = self._choose(lane, step, inputs, o, context) if len(inputs.logits_indices) else []
            enter("commit", lane)
            self._finish_step(scheduler, step, tokens)
        self._announce(link, scheduler.stop_plan())
        self.prefill.finish(())

    def _count_wait(self) -> None:
        """Raise InvariantViolation if all lanes have waited for longer than any schedule has them wait."""
        self._waits += 1
        steps = max(scheduler.limits.period for scheduler in self.schedulers) + 2
        if self._waits > len(self.schedulers) * len(self.shapes) * steps:
            raise InvariantViolation(
                "a lane waits only for room that others hold",
                f"no lane has run for {steps} steps, and rows are left ({self.tokens_in_flight} tokens in flight)",
            )

    def _announce(self, link: SLink, plan: Plan) -> None:
        link.begin(dataclasses.replace(plan, number=self._plans))
        self._plans += 1

    def _forward(
        self, lane: int, link: SLink, step: Step, inputs: Inputs
    ) -> Generator[bool, None, tuple[Tensor, tuple[Tensor, ...]]]:
        """Run the slices but the last; yields after every post, returns what the last one takes."""
        decodes, enter = len(step.decode), self.timeline.enter
        for chunk in step.prefill:
            for sequence in chunk.sequence.with_forks:
                sequence.times.queued = sequence.times.queued or time()
        o, context = None, (inputs.ids, inputs.positions, inputs.logits_indices)
        if self._walks(step):
            enter("slice", lane)
            q, k, v, context = self.model.slice(0, None, context)
            o, context = link.walk(self.walk, q, k, v, context)
            self._turn += len(self.shapes) - 1
            yield True
            return o, context
        for layer in range(len(self.shapes)):
            enter("slice", lane)
            q, k, v, context = self.model.slice(layer, o, context)
            o = self.model.empty_output(layer, len(q))
            enter("post", lane)
            link.post(layer, q, k, v, o)
            if step.prefill:
                enter("prefill", lane)
                self._attend_prompts(layer, step, inputs, *(x[decodes:] for x in (q, k, v, o)))
            yield True
            enter("wait", lane)
            link.wait()
            enter("take", lane)
            link.take()
        self.prefill.finish(step.prefill)
        return o, context

    def _choose(self, lane: int, step: Step, inputs: Inputs, o: Tensor, context: tuple[Tensor, ...]) -> list[int]:
        """The tokens of the step's sampled sequences."""
        self.timeline.enter("logits", lane)
        largest = self.model.argmax(o, context) if inputs.argmax_suffices else None
        if largest is not None:
            return inputs.select(largest).tolist()
        logits = self.model.logits(o, context)
        inputs.take_prompt_logprobs(logits)
        logits = inputs.select(logits)
        self.timeline.enter("sample", lane)
        tokens = sample(logits, step.sampled, self.stops.eos, self.grammars)
        advance_beams(logits, step.sampled)
        take_logprobs(logits, step.sampled, tokens)
        return tokens

    def _attend_prompts(
        self, layer: int, step: Step, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, o: Tensor
    ) -> None:
        """Only logits follow the last attention, so it is done for those who need them."""
        skipped_queries = inputs.skipped_queries if layer == len(self.shapes) - 1 else None
        self.prefill.attend(layer, step.prefill, q, k, v, o, self.model.sinks(layer), skipped_queries)

    def _walks(self, step: Step) -> bool:
        """Whether a step goes from the first attention to the last in one call."""
        if self.walk is None or step.prefill or not step.decode:
            return False
        return self.walk.suits([s.length for s in step.decode])

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
        self.peak_prefill_tokens = max(self.peak_prefill_tokens, self.prefill.tokens)
        if step.prefill and scheduler.all_prefilled():
            self.prefill.shrink()
            give_back()

    def _count_seconds(self, step: Step) -> None:
        """The time since any lane's last step ended belongs to this step, and to all of its tokens alike."""
        seconds, decodes, prompts = self.timeline.lap(), len(step.decode), sum(c.count for c in step.prefill)
        of_decodes = seconds * decodes / (decodes + prompts)
        self.decode_seconds += of_decodes
        self.prefill_seconds += seconds - of_decodes
        self.decode_tokens += decodes
