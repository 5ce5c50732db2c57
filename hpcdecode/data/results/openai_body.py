"""Bodies of answers in the form of the OpenAI API: choices, messages, log-probabilities and usage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isnan
from typing import Any, NamedTuple

from hpcdecode.requests.output_parser import ToolCall

OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}  # type of an answer by endpoint
URLS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}  # the endpoints

TokenText = Callable[[int], str]


class TokenEntry(NamedTuple):
    """The text and log-probability of a token, and those of the most likely tokens in its place.

    Attributes:
        text: Text of the token alone.
        logprob: Its log-probability; None for the first token of a prompt.
        top: Texts and log-probabilities, most likely first.
    """

    text: str
    logprob: float | None
    top: list[tuple[str, float]]


def token_entries(
    token_ids: Iterable[int],
    chosen: Iterable[float],
    top_ids: Iterable[Sequence[int]],
    top: Iterable[Sequence[float]],
    text: TokenText,
) -> list[TokenEntry]:
    """Return the entries of tokens.

    Args:
        token_ids: The tokens.
        chosen: Their log-probabilities; NaN for none.
        top_ids: The most likely tokens in place of each.
        top: Log-probabilities of these; NaN where there is no token.
        text: Returns the text of a token.
    """
    return [
        TokenEntry(
            text(token),
            None if isnan(value) else value,
            [(text(i), v) for i, v in zip(ids, values, strict=True) if not isnan(v)],
        )
        for token, value, ids, values in zip(token_ids, chosen, top_ids, top, strict=True)
    ]


def chat_logprobs(entries: Iterable[TokenEntry]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat completion."""
    return {
        "content": [
            {
                **_with_bytes(entry.text, entry.logprob),
                "top_logprobs": [_with_bytes(text, logprob) for text, logprob in entry.top],
            }
            for entry in entries
        ]
    }


def _with_bytes(text: str, logprob: float | None) -> dict[str, Any]:
    """Return a token of a chat; its `bytes` are null if the token is a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def completion_logprobs(entries: Iterable[TokenEntry], offset: int = 0) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a text completion; `offset` is that of the first token's text."""
    made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        made["tokens"].append(entry.text)
        made["token_logprobs"].append(entry.logprob)
        made["top_logprobs"].append(None if entry.logprob is None else _by_text(entry))
        made["text_offset"].append(offset)
        offset += len(entry.text)
    return made


def _by_text(entry: TokenEntry) -> dict[str, float | None]:
    """Return log-probabilities by text; of tokens with one text, such as parts of characters, the likeliest's."""
    made: dict[str, float | None] = {}
    for text, logprob in (*entry.top, (entry.text, entry.logprob)):
        made.setdefault(text, logprob)
    return made


def said(text: str, content: str | None, reasoning: str | None, calls: list[ToolCall] | None) -> dict[str, Any]:
    """Return what a message says: its text, or the text's parts. Reasoning has both names that there are for it."""
    made: dict[str, Any] = {"content": content if content or reasoning or calls else text}
    if reasoning:
        made |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return made | ({"tool_calls": calls} if calls else {})


def chat_finish_reason(reason: str, calls: list[ToolCall] | None) -> str:
    """Return the finish reason of a choice of a chat completion."""
    return "tool_calls" if reason == "stop" and calls else reason


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Return the `usage` of an answer; cached_tokens: of the prompt, whose K and V other rows had, if that is known."""
    details = {} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **details,
    }
