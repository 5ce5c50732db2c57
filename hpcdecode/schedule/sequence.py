"""One generation of a row, from admission to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdecode.data.tokens import Prompt


@dataclass(slots=True, eq=False)
class Sequence:
    """State that the S-rank keeps; the KV cache itself lies on R-rank `rank`, in slot `slot` of its store."""

    prompt: Prompt
    max_new: int  # tokens to generate at most
    lane: int
    rank: int  # index among the R-ranks
    slot: int
    start_step: int  # the lane step at which decoding starts
    sample: int = 0
    prefilled: int = 0  # prompt tokens already sent to the R-rank
    generated: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def length(self) -> int:
        """Tokens in the KV cache: the newest generated token has not been fed back yet."""
        return self.prefilled + max(len(self.generated) - 1, 0)

    @property
    def final_length(self) -> int:
        """Tokens in the KV cache at the end, if no stop condition ends the sequence early."""
        return self.prompt_length + self.max_new - 1

    @property
    def end_step(self) -> int:
        """The last lane step in which the sequence can still be decoded."""
        return self.start_step + self.max_new - 2

    def accept(self, token: int, eos: frozenset[int]) -> None:
        """Append a sampled token and settle whether it ends the sequence."""
        params = self.prompt.params
        self.generated.append(token)
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            self.finish_reason = "stop"
        elif len(self.generated) >= self.max_new:
            self.finish_reason = "length"
