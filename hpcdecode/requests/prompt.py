"""Prompts that are ready to decode, and what an interrupted job has generated for them."""

from __future__ import annotations

import msgspec

from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.params import SamplingParams


class Unfinished(msgspec.Struct, array_like=True):
    """A sequence whose row is not finished: what it has generated so far."""

    line: int
    sample: int
    token_ids: list[int]
    logprobs: Logprobs | None = None  # theirs, where the row asks for them
    prompt_logprobs: Logprobs | None = None


class Prompt(msgspec.Struct):
    """A row that is ready to decode."""

    line: int  # 1-based, through all files
    id: str
    token_ids: list[int]  # at least 1, and at least 1 position less than the model has
    params: SamplingParams
    unfinished: list[Unfinished] = []  # what an earlier run of the job has generated, in any order
    bad_word_ids: list[list[int]] = []  # what params.bad_words forbids as token ids
