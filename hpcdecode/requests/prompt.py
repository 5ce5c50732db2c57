"""Prompts that are ready to decode, and what an interrupted job has generated for them."""

from __future__ import annotations

import msgspec

from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.params import SamplingParams
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
        token_ids: at least 1, and at least 1 position less than the model has.
        unfinished: what an earlier run of the job has generated, in any order.
        bad_word_ids: what `params.bad_words` forbids, as token ids.
        thinking: how the reasoning begins and ends, if `params.thinking_token_budget` bounds it.
    """

    line: int
    id: str
    token_ids: list[int]
    params: SamplingParams
    unfinished: list[Unfinished] = []
    bad_word_ids: list[list[int]] = []
    thinking: Thinking | None = None
