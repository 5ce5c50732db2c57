"""Prompts that are ready to decode, and what an interrupted job has generated for them."""

from __future__ import annotations

import msgspec

from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.target import Target
from hpcdecode.requests.thinking import Thinking


class Unfinished(msgspec.Struct, array_like=True):
    """A sequence of a request that is not finished: what it has generated so far.

    Attributes:
        logprobs: of token_ids, if the row asks for them.
        prompt_logprobs: of the prompt, once they are complete.
    """

    line: int
    sample: int
    token_ids: list[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class Prompt(msgspec.Struct):
    """A row that is ready to decode.

    Attributes:
        line: 1-based, through all files.
        token_ids: at least 1, and at least 1 position less than the model has. Of a row that is scored, what comes
            before every continuation; none before a text.
        unfinished: what an earlier run of the job has generated, in any order.
        bad_word_ids: what `params.bad_words` forbids, as token ids.
        thinking: how the reasoning begins and ends, if `params.thinking_token_budget` bounds it.
        targets: what is scored, in the order of the tokens of each continuation; nothing if text is generated.
        texts: of the continuations; those that are not there are the texts of their tokens.
        drawn_as: the line whose random numbers it draws; 0 for its own.
        updates: its tokens are told as they come.
        adapter: number of the adapter that updates its tokens; -1 for none.
        lora: its name; empty for none.
    """

    line: int
    id: str
    token_ids: list[int]
    params: SamplingParams
    unfinished: list[Unfinished] = []
    bad_word_ids: list[list[int]] = []
    thinking: Thinking | None = None
    targets: list[Target] = []
    texts: list[str] = []
    drawn_as: int = 0
    updates: bool = False
    adapter: int = -1
    lora: str = ""

    @property
    def draw_line(self) -> int:
        """Return the line whose random numbers it draws."""
        return self.drawn_as or self.line

    @property
    def sequences(self) -> int:
        """Return how many sequences it becomes."""
        return len(self.targets) or self.params.samples

    @property
    def input_tokens(self) -> int:
        """Return the tokens that its sequences begin with, all together."""
        if self.targets:
            return sum(len(target.input_ids) for target in self.targets)
        return len(self.token_ids) * self.params.samples
