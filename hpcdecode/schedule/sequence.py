"""One generation of a row, from admission to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcdecode.data.tokens import Prompt
from hpcdecode.schedule.stops import Decode, Stops, StopText

if TYPE_CHECKING:
    from hpcdecode.sampling.adjust import TokenCounts
    from hpcdecode.sampling.structured import Matcher


@dataclass(slots=True, eq=False)
class Sequence:
    """State that the S-rank keeps; the KV cache itself lies on R-rank `rank`, in slot `slot` of its store."""

    prompt: Prompt
    max_new: int  # tokens to generate at most in this run
    lane: int
    rank: int  # index among the R-ranks
    slot: int
    start_step: int  # the lane step at which decoding starts
    sample: int = 0
    prefilled: int = 0  # prompt tokens already sent to the R-rank
    generated: list[int] = field(default_factory=list)  # an earlier run's tokens first
    finish_reason: str | None = None
    hidden_tokens: int = 0  # the last of `generated` that its text leaves out
    hidden_characters: int = 0  # the last of the text of the others that it leaves out too
    counts: TokenCounts | None = None  # kept for a row with penalties
    stop_text: StopText | None = None  # kept for a row with stop strings
    matcher: Matcher | None = None  # kept for a row with structured outputs
    queued_at: float = 0.0  # Unix times: its prefill began, its first token came, its last token came
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        self.generated += self.prompt.resumed_ids

    @property
    def prompt_length(self) -> int:
        """Tokens to prefill: the prompt, and what an earlier run generated."""
        return len(self.prompt.token_ids)

    @property
    def length(self) -> int:
        """Tokens in the KV cache: the newest generated token has not been fed back yet."""
        return self.prefilled + max(self.new - 1, 0)

    @property
    def new(self) -> int:
        """Tokens generated in this run."""
        return len(self.generated) - self.prompt.resumed

    @property
    def final_length(self) -> int:
        """Tokens in the KV cache at the end, if no stop condition ends the sequence early."""
        return self.prompt_length + self.max_new - 1

    @property
    def end_step(self) -> int:
        """The last lane step in which the sequence can still be decoded."""
        return self.start_step + self.max_new - 2

    def accept(self, token: int, stops: Stops) -> None:
        """Append a sampled token and settle whether it ends the sequence."""
        self.generated.append(token)
        if stops.at_token(self) or stops.at_string(self):
            self.finish_reason = "stop"
        elif self.new >= self.max_new:
            self.finish_reason = "length"

    def text(self, decode: Decode) -> str:
        """The text of what was generated, without a stop token or a stop string and what follows it."""
        shown = len(self.generated) - self.hidden_tokens
        text = decode(self.generated[:shown], self.prompt.params.skip_special_tokens)
        return text[: len(text) - self.hidden_characters]
