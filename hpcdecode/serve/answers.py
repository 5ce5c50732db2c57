"""Answers to requests for text that are sent at once, as one body."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

from hpcdecode.data.results.openai_body import (
    OBJECTS,
    TokenEntry,
    TokenText,
    chat_finish_reason,
    chat_logprobs,
    completion_logprobs,
    said,
    token_entries,
    usage,
)
from hpcdecode.data.results.result import Result
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.serve.bodies import Asked
from hpcdecode.serve.submission import PromptJob

_PREFIXES = {"chat": "chatcmpl", "completions": "cmpl"}


def head_of(asked: Asked, chunk: bool = False) -> dict[str, Any]:
    """Return what every body of an answer begins with."""
    kind = "chat.completion.chunk" if chunk and asked.endpoint == "chat" else OBJECTS[asked.endpoint]
    key = f"{_PREFIXES[asked.endpoint]}-{uuid.uuid4().hex}"
    return {"id": key, "object": kind, "created": int(time.time()), "model": asked.model}


def answer_of(
    asked: Asked, jobs: Sequence[PromptJob], results: Sequence[Sequence[Result]], text: TokenText
) -> dict[str, Any]:
    """Return the body of an answer.

    Args:
        asked: The request.
        jobs: Its prompts.
        results: Those of each, by sample.
        text: Returns the text of a token.
    """
    choices = [c for job, found in zip(jobs, results, strict=True) for c in choices_of(asked, job, found, text)]
    made = 0 if asked.scores else sum(len(r.token_ids) for found in results for r in found)
    used = usage(sum(len(job.token_ids) for job in jobs), made, sum(map(cached_tokens, results)))
    body = {**head_of(asked), "choices": choices, "usage": used}
    first = results[0][0] if results[0] else None
    if asked.endpoint == "chat" and first is not None and asked.shows_prompt:
        body["prompt_logprobs"] = prompt_logprobs_of(first, text)
    return body


def cached_tokens(results: Sequence[Result]) -> int:
    """Return how many tokens of a prompt other rows had."""
    return results[0].shortcuts.cached_tokens if results else 0


def choices_of(asked: Asked, job: PromptJob, results: Sequence[Result], text: TokenText) -> Iterator[dict[str, Any]]:
    """Yield the choices of a prompt."""
    if asked.scores:
        yield _scored_choice(job, results, text)
        return
    for result in results:
        index = job.first + result.sample
        yield (_chat_choice if asked.endpoint == "chat" else _text_choice)(asked, job, results[0], result, index, text)


def _chat_choice(
    asked: Asked, job: PromptJob, first: Result, result: Result, index: int, text: TokenText
) -> dict[str, Any]:
    logprobs = None if result.logprobs is None else chat_logprobs(entries_of(result.token_ids, result.logprobs, text))
    return {
        "index": index,
        "message": {"role": "assistant", **message_of(result)},
        "logprobs": logprobs,
        "finish_reason": chat_finish_reason(result.finish_reason, result.tool_calls),
    }


def message_of(result: Result) -> dict[str, Any]:
    """Return what a message says."""
    text = result.text if result.content is None else ""
    return said(text, result.content, result.reasoning, result.tool_calls)


def _text_choice(
    asked: Asked, job: PromptJob, first: Result, result: Result, index: int, text: TokenText
) -> dict[str, Any]:
    entries: list[TokenEntry] = []
    if asked.echo and first.prompt_logprobs is not None:
        entries = entries_of(job.token_ids, first.prompt_logprobs, text)
    if result.logprobs is not None:
        entries += entries_of(result.token_ids, result.logprobs, text)
    choice = {
        "index": index,
        "text": job.text + result.text,
        "logprobs": None if result.logprobs is None else completion_logprobs(entries),
        "finish_reason": result.finish_reason,
    }
    if asked.shows_prompt:
        choice["prompt_logprobs"] = prompt_logprobs_of(first, text)
    return choice


def _scored_choice(job: PromptJob, results: Sequence[Result], text: TokenText) -> dict[str, Any]:
    """Return the choice of a prompt of which nothing is generated."""
    logprobs = None
    if results and results[0].logprobs is not None:
        logprobs = completion_logprobs(entries_of(results[0].token_ids, results[0].logprobs, text))
    elif job.scored_alone:
        logprobs = completion_logprobs(entries_of(job.token_ids, Logprobs([nan], [[]], [[]]), text))
    return {"index": job.first, "text": job.text, "logprobs": logprobs, "finish_reason": "length"}


def entries_of(token_ids: Sequence[int], held: Logprobs, text: TokenText) -> list[TokenEntry]:
    """Return tokens with their log-probabilities."""
    return token_entries(token_ids, held.chosen, held.top_ids, held.top, text)


def prompt_logprobs_of(result: Result, text: TokenText) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt's tokens, by token id, in the form of vLLM; the first has none."""
    held = result.prompt_logprobs
    assert held is not None, "expected a result with those of its prompt"
    each = zip(result.prompt_token_ids, held.chosen, held.top_ids, held.top, strict=True)
    pairs = [{**dict(zip(ids, top, strict=True)), token: own} for token, own, ids, top in each]
    shown = [{str(i): {"logprob": v, "decoded_token": text(i)} for i, v in of.items()} for of in pairs]
    return [None, *shown[1:]]
