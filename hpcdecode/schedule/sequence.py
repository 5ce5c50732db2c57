"""One generation of a row, from admission to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING

from hpcdecode.data.logprobs import Logprobs
from hpcdecode.data.tokens import Prompt, Unfinished
from hpcdecode.schedule.beams import Beams, Hypothesis
from hpcdecode.schedule.stops import Decode, Stops, StopText

if TYPE_CHECKING:
    from hpcdecode.sampling.adjust import TokenCounts
    from hpcdecode.sampling.structured import Matcher
    from hpcdecode.schedule.prefixes import Prefix


@dataclass(slots=True, eq=False)
class Stem:
    """Whole KV blocks that several sequences hold: the positions from `start` up to `end`."""

    start: int
    end: int


@dataclass(slots=True, eq=False)
class Sequence:
    """State that the S-rank keeps; the KV cache itself lies on R-rank `rank`, in slot `slot` of its store."""

    prompt: Prompt
    max_new: int  # tokens to generate at most, those of an earlier run included
    lane: int
    sample: int = 0
    rank: int = -1  # index among the R-ranks
    slot: int = -1
    start_step: int = 0  # the lane step at which decoding starts
    family: list[Sequence] = field(default_factory=list)  # all samples of the row
    followers: list[Sequence] = field(default_factory=list)  # samples that fork from this one once it is prefilled
    prefix: Prefix | None = None  # what it shares with sequences of other rows
    stem: Stem | None = None  # what it shares, beyond that, with its followers, or the sequence that it follows
    resumed: int = 0  # tokens that an earlier run generated
    prefilled: int = 0  # tokens of its input already sent to the R-rank
    generated: list[int] = field(default_factory=list)  # an earlier run's tokens first
    logprobs: Logprobs | None = None  # of `generated`, for a row that asks for them
    prompt_logprobs: Logprobs | None = None  # kept with sample 0
    cumulative_logprob: float = nan  # of a beam that has ended
    beams: Beams | None = None  # the search that the samples of its row are beams of
    finish_reason: str | None = None
    problem: str | None = None  # why it is no result, and its row an error, whatever it generates
    hidden_tokens: int = 0  # the last of `generated` that its text leaves out
    hidden_characters: int = 0  # the last of the text of the others that it leaves out too
    counts: TokenCounts | None = None  # kept for a row with penalties
    stop_text: StopText | None = None  # kept for a row with stop strings
    matcher: Matcher | None = None  # kept for a row with structured outputs
    queued_at: float = 0.0  # Unix times: its prefill began, its first token came, its last token came
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt.params.logprobs is not None:
            self.logprobs = Logprobs()
        if self.prompt.params.prompt_logprobs is not None and self.sample == 0:
            self.prompt_logprobs = Logprobs([nan], [[]], [[]])

    @property
    def input_ids(self) -> list[int]:
        """What is prefilled: the prompt, and what an earlier run generated."""
        ids = self.prompt.token_ids
        return ids + self.generated[: self.resumed] if self.resumed else ids

    @property
    def prompt_length(self) -> int:
        """Tokens to prefill."""
        return len(self.prompt.token_ids) + self.resumed

    @property
    def ranks(self) -> list[int]:
        """The R-ranks that its prompt is sent to."""
        return [self.rank]

    @property
    def branch(self) -> list[Sequence]:
        """The sequences that go on from its prompt: itself, and those that follow it."""
        return [self, *self.followers]

    @property
    def shares_prefix(self) -> bool:
        """Whether it may; not where the logits of all its positions are asked for."""
        return self.prompt.params.prompt_logprobs is None

    @property
    def shared(self) -> int:
        """Tokens at the beginning whose KV blocks are counted with its stem and its prefix."""
        if self.stem:
            return self.stem.end
        return self.prefix.prompt_length if self.prefix else 0

    @property
    def length(self) -> int:
        """Tokens in the KV cache: the newest generated token has not been fed back yet."""
        return self.prefilled + max(len(self.generated) - self.resumed - 1, 0)

    @property
    def final_length(self) -> int:
        """Tokens in the KV cache at the end, if no stop condition ends the sequence early."""
        return len(self.prompt.token_ids) + self.max_new - 1

    @property
    def end_step(self) -> int:
        """The last lane step in which the sequence can still be decoded."""
        return self.start_step + self.max_new - self.resumed - 2

    def begin_with(self, prefix: Prefix | None) -> None:
        """Let its branch share `prefix` before anything of it is prefilled; None: nothing."""
        for sequence in self.branch:
            sequence.prefix = prefix
            sequence.prefilled = prefix.prompt_length if prefix else 0
        if self.stem:
            self.stem.start = self.prefilled

    def accept(self, token: int, stops: Stops) -> None:
        """Append a sampled token and settle whether it ends the sequence."""
        self.generated.append(token)
        if stops.at_token(self) or stops.at_string(self):
            self.finish_reason = "stop"
        elif len(self.generated) >= self.max_new:
            self.finish_reason = "length"

    def end_as(self, hypothesis: Hypothesis) -> None:
        """Become what a beam search has found."""
        self.generated, self.cumulative_logprob = hypothesis.token_ids, hypothesis.logprob
        stopped = self.generated[-1] in self.beams.ends
        self.finish_reason = "stop" if stopped else "length"
        self.hidden_tokens = int(stopped and not self.prompt.params.include_stop_str_in_output)

    def unfinished(self) -> Unfinished:
        """What is kept of it if the job is interrupted."""
        prompt = self.prompt_logprobs
        complete = prompt is not None and len(prompt) == len(self.prompt.token_ids)
        return Unfinished(
            self.prompt.line, self.sample, list(self.generated), self.logprobs, prompt if complete else None
        )

    def resume(self, earlier: Unfinished, stops: Stops) -> None:
        """Take over what an earlier run generated; it may have been all."""
        self.generated = earlier.token_ids[:-1]
        self.accept(earlier.token_ids[-1], stops)
        self.resumed = len(self.generated)
        self.logprobs = earlier.logprobs
        self.prompt_logprobs = earlier.prompt_logprobs or self.prompt_logprobs

    def text(self, decode: Decode) -> str:
        """The text of what was generated, without a stop token or a stop string and what follows it."""
        shown = len(self.generated) - self.hidden_tokens
        text = decode(self.generated[:shown], self.prompt.params.skip_special_tokens)
        return text[: len(text) - self.hidden_characters]


def family_of(prompt: Prompt, max_new: int, lane: int, stops: Stops) -> list[Sequence]:
    """All samples of a row, with what an earlier run generated; at least one of them is not finished."""
    params = prompt.params
    family = [Sequence(prompt, max_new, lane, sample) for sample in range(params.samples)]
    if params.beam_width:
        beams = Beams(params.beam_width, params.length_penalty, max_new, stops.ends_of(params))
        for sequence in family:
            sequence.beams = beams
    for earlier in prompt.unfinished:
        family[earlier.sample].resume(earlier, stops)
    if all(s.finish_reason for s in family):
        family[-1] = Sequence(prompt, max_new, lane, family[-1].sample)
    for sequence in family:
        sequence.family = family
    return family


def branches_of(family: list[Sequence], block_tokens: int) -> list[Sequence]:
    """The sequences that are to be prefilled; those of a row that begins are one, which the others follow."""
    fresh = [s for s in family if not s.generated]
    if len(fresh) > 1:
        fresh[0].followers = fresh[1:]
        stem = Stem(0, fresh[0].prompt_length // block_tokens * block_tokens)
        for sequence in fresh:
            sequence.stem = stem
    return fresh[:1] + [s for s in family if s.resumed and not s.finish_reason]
