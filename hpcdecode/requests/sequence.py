"""A request in flight, and its sequences from admission to their last tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan

from hpcdecode.requests.beams import Beams, Hypothesis
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.prefix import Prefix, SharedBlocks, new_key
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence_parts import DraftState, Hidden, SamplerState, Times
from hpcdecode.requests.shortcuts import NO_SHORTCUTS, Shortcuts
from hpcdecode.requests.stops import Decode, Stops
from hpcdecode.requests.swapped import SwapTicket
from hpcdecode.requests.target import Scores, Target

CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Request:
    """A row in flight.

    Attributes:
        max_new_tokens: of each sequence at most, those of an earlier run included.
        sequences: all its samples, or the beams of its search.
        cancelled: nobody wants it any more; its sequences end with their next tokens.
        shortcuts: what it was spared so far.
        number: greater than those of the requests that were started before.
    """

    prompt: Prompt
    max_new_tokens: int
    lane: int
    beams: Beams | None = None
    sequences: list[SequenceState] = field(default_factory=list)
    cancelled: bool = False
    shortcuts: Shortcuts = NO_SHORTCUTS
    number: int = field(default_factory=new_key)

    @property
    def finished(self) -> bool:
        """Return whether all its sequences are."""
        return all(s.finish_reason for s in self.sequences)

    @property
    def error(self) -> str | None:
        """Return why it has no result, or None."""
        if self.cancelled:
            return CANCELLED
        return next((s.error for s in self.sequences if s.error is not None), None)


@dataclass(slots=True, eq=False)
class SequenceState:
    """What the S-rank knows of a sequence; its K and V lie on R-rank `rank`, in slot `slot` of the KV cache.

    Attributes:
        rank: index among the R-ranks.
        start_step: the lane step at which decoding starts.
        forks: sequences of the request that fork from this one once it is prefilled.
        prefix: what it shares with sequences of other requests.
        shared_blocks: what it shares, beyond that, with its forks, or with the sequence that it forks from.
        prefilled: tokens of its input that the R-rank has.
        resumed: how many of `generated` are prefilled with the prompt; they come first.
        earlier: how many of `generated` an earlier run made.
        preemptions: how often it gave up its room.
        swap: where its K and V are if they have left for a tier, and while they are brought back.
        logprobs: of `generated`, if the request asks for them.
        prompt_logprobs: of the prompt, kept with sample 0, if the request asks for them.
        cumulative_logprob: of a beam that has ended.
        target: what is scored of a row that generates nothing, in place of the prompt.
        scores: of the target.
        error: why it is no result, and its row an error, whatever it generates.
        key: by which the ranks of a group name it.
    """

    request: Request
    sample: int = 0
    rank: int = -1
    slot: int = -1
    start_step: int = 0
    forks: list[SequenceState] = field(default_factory=list)
    prefix: Prefix | None = None
    shared_blocks: SharedBlocks | None = None
    prefilled: int = 0
    resumed: int = 0
    earlier: int = 0
    preemptions: int = 0
    swap: SwapTicket | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cumulative_logprob: float = nan
    target: Target | None = None
    scores: Scores = field(default_factory=Scores)
    finish_reason: str | None = None
    error: str | None = None
    hidden: Hidden = field(default_factory=Hidden)
    sampler: SamplerState = field(default_factory=SamplerState)
    draft: DraftState = field(default_factory=DraftState)
    times: Times = field(default_factory=Times)
    key: int = field(default_factory=new_key)

    def __post_init__(self) -> None:
        if self.target is not None:
            return
        if self.prompt.params.logprobs is not None:
            self.logprobs = Logprobs()
        if self.prompt.params.prompt_logprobs is not None and self.sample == 0:
            self.prompt_logprobs = Logprobs([nan], [[]], [[]])

    @property
    def prompt(self) -> Prompt:
        """Return the prompt of its request."""
        return self.request.prompt

    @property
    def adapter(self) -> int:
        """Return the number of the adapter that updates its tokens; -1 for none."""
        return self.prompt.adapter

    @property
    def lane(self) -> int:
        """Return the lane of its request."""
        return self.request.lane

    @property
    def beams(self) -> Beams | None:
        """Return the search that it is a beam of, or None."""
        return self.request.beams

    @property
    def input_ids(self) -> list[int]:
        """Return the tokens to prefill: the prompt, and what was generated before; or those of the target."""
        ids = self.given_ids
        return ids + self.generated[: self.resumed] if self.resumed else ids

    @property
    def given_ids(self) -> list[int]:
        """Return the tokens that it begins with: the prompt, or those of the target."""
        return self.prompt.token_ids if self.target is None else self.target.input_ids

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens to prefill."""
        return len(self.given_ids) + self.resumed

    @property
    def ranks(self) -> list[int]:
        """Return the R-ranks that its prompt is sent to."""
        return [self.rank]

    @property
    def with_forks(self) -> list[SequenceState]:
        """Return the sequences that go on from its prompt: itself and its forks."""
        return [self, *self.forks]

    @property
    def seniority(self) -> tuple[int, int]:
        """Return its place in the order in which sequences were started."""
        return self.request.number, self.sample

    @property
    def shareable_ids(self) -> list[int]:
        """Return the tokens of which it may share all but the last as a prefix.

        They end where logits are asked for. There are none if the S-rank needs K and V of all positions.
        """
        if self.target is not None:
            return self.target.input_ids[: self.target.start]
        return [] if self.resumed or self.prompt.params.prompt_logprobs is not None else self.prompt.token_ids

    @property
    def shared(self) -> int:
        """Return how many of its first tokens are counted with its shared blocks and its prefix."""
        if self.shared_blocks:
            return self.shared_blocks.end
        return self.prefix.prompt_length if self.prefix else 0

    @property
    def ahead(self) -> int:
        """Return the tokens that it may hold beyond its course, of a draft."""
        return self.draft.ahead

    @property
    def length(self) -> int:
        """Return its tokens in the KV cache; the newest generated token has not been fed back yet."""
        return self.prefilled + max(len(self.generated) - self.resumed - 1, 0)

    @property
    def final_length(self) -> int:
        """Return its tokens in the KV cache at the end, if no stop condition ends it early."""
        return len(self.given_ids) + self.request.max_new_tokens - 1

    @property
    def end_step(self) -> int:
        """Return the last lane step in which it can still be decoded."""
        return self.start_step + self.request.max_new_tokens - self.resumed - 2

    def begin_with(self, prefix: Prefix | None) -> None:
        """Let it and its forks share `prefix`, or nothing, before anything of them is prefilled."""
        for sequence in self.with_forks:
            sequence.prefix = prefix
            sequence.prefilled = prefix.prompt_length if prefix else 0
        if self.shared_blocks:
            self.shared_blocks.start = self.prefilled

    def accept(self, token: int, stops: Stops) -> None:
        """Append a sampled token and settle whether it ends the sequence. A target takes none, and has its end."""
        if self.target is not None:
            self.finish_reason = "length"
            return
        self.generated.append(token)
        if self.request.cancelled:
            self.finish_reason = CANCELLED
        elif self._stops_at_token(stops) or self._stops_at_string(stops):
            self.finish_reason = "stop"
        elif len(self.generated) >= self.request.max_new_tokens:
            self.finish_reason = "length"

    def _stops_at_token(self, stops: Stops) -> bool:
        params = self.prompt.params
        if self.generated[-1] not in stops.ends_of(params):
            return False
        self.hidden.tokens = int(not params.include_stop_str_in_output)
        return True

    def _stops_at_string(self, stops: Stops) -> bool:
        """Return whether the newest token completes a stop string, at more than min_tokens tokens as in vLLM."""
        params, sampler = self.prompt.params, self.sampler
        if not params.stop:
            return False
        sampler.stop_text = sampler.stop_text or stops.text_of(params, self.generated[:-1])
        found = sampler.stop_text.feed(self.generated[-1])
        if found is None or len(self.generated) <= params.min_tokens:
            return False
        self.hidden.characters = found.after_end if params.include_stop_str_in_output else found.after_start
        return True

    def end_as(self, hypothesis: Hypothesis) -> None:
        """Become what the request's beam search has found."""
        self.generated, self.cumulative_logprob = hypothesis.token_ids, hypothesis.logprob
        stopped = self.beams is not None and self.generated[-1] in self.beams.ends
        self.finish_reason = "stop" if stopped else "length"
        self.hidden.tokens = int(stopped and not self.prompt.params.include_stop_str_in_output)

    def unfinished(self) -> Unfinished:
        """Return what is kept of it if the job is interrupted."""
        prompt = self.prompt_logprobs
        complete = prompt is not None and len(prompt) == len(self.prompt.token_ids)
        return Unfinished(
            self.prompt.line, self.sample, list(self.generated), self.logprobs, prompt if complete else None
        )

    def resume(self, earlier: Unfinished, stops: Stops) -> None:
        """Take over what an earlier run generated; it may have been all. `earlier` stays as it is."""
        self.generated = earlier.token_ids[:-1]
        self.accept(earlier.token_ids[-1], stops)
        self.resumed = self.earlier = len(self.generated)
        self.logprobs = None if earlier.logprobs is None else earlier.logprobs.copy()
        self.prompt_logprobs = earlier.prompt_logprobs or self.prompt_logprobs

    @property
    def returning(self) -> bool:
        """Return whether its K and V are being brought back to an R-rank."""
        return self.swap is not None and self.rank >= 0

    def give_up_room(self, swap: SwapTicket | None = None) -> None:
        """Go back to before its prefill, with all that it has generated; so do its forks if it has generated nothing.

        It has no slot. Its own K and V are gone; with `swap` they are in a tier, and nothing of it is prefilled again.
        """
        if self.generated:
            self.forks, self.shared_blocks = [], None
        for sequence in self.with_forks:
            sequence.preemptions += 1
            sequence.start_over()
        if swap is not None:
            self.swap, self.resumed = swap, self.resumed - 1
            self.prefilled = self.prompt_length

    def start_over(self) -> None:
        """Go back to before its prefill, with all that it has generated."""
        self.rank, self.prefix, self.prefilled = -1, None, 0
        self.resumed = len(self.generated)
        self.key = new_key()  # ranks may still hold K and V under the old one

    def text(self, decode: Decode) -> str:
        """Return the text of what was generated, up to a stop token or a stop string."""
        shown = len(self.generated) - self.hidden.tokens
        text = decode(self.generated[:shown], self.prompt.params.skip_special_tokens)
        return text[: len(text) - self.hidden.characters]
