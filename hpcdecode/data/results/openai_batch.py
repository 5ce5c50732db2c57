"""The output of an OpenAI batch: turns each row of the results into the answer to its request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from math import isnan
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.read import Results
from hpcdecode.errors import UserError

OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}  # type of an answer by endpoint

Row = dict[str, Any]
TokenText = Callable[[int], str]


class _TokenEntry(NamedTuple):
    """The text and log-probability of a token, and those of the most likely tokens in its place."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


def answers(results: Results, rows: Iterable[Row], endpoint: str) -> Iterator[dict[str, Any]]:
    """Yield an answer for each row and each row that could not be used, by line of the prompt file.

    Tokens with log-probabilities are shown as text if the model's tokenizer is still at the job's path, else in the
    form `token_id:17`.

    Args:
        results: The results file.
        rows: Its rows, by line and sample.
        endpoint: A key of OBJECTS.
    """
    model = results.attributes.get("model")
    path = str(model.get("path", "")) if isinstance(model, dict) else ""
    text = _token_text(path) if "logprobs" in results.columns else str
    errors = iter(results.errors())
    error = next(errors, None)
    for line, samples in groupby(rows, key=itemgetter("line")):
        while error is not None and error["line"] < line:
            yield _refusal(error)
            error = next(errors, None)
        yield _answer(list(samples), Path(path).name, endpoint, text)
    while error is not None:
        yield _refusal(error)
        error = next(errors, None)


def _token_text(model: str) -> TokenText:
    """Return a function from a token id to its text, for the model in the directory `model`."""
    try:
        tokenizer = Tokenizer.load(model)
    except UserError:
        return lambda token: f"token_id:{token}"
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def _answer(samples: list[Row], model: str, endpoint: str, text: TokenText) -> dict[str, Any]:
    first, made = samples[0], sum(len(s["token_ids"]) for s in samples)
    key = f"hpcdecode-{first['line']}"
    body = {
        "id": key,
        "object": OBJECTS[endpoint],
        "created": int(first["finished_at"]),
        "model": model,
        "choices": [_choice(s, endpoint, text) for s in samples],
        "usage": {
            "prompt_tokens": first["prompt_tokens"],
            "completion_tokens": made,
            "total_tokens": first["prompt_tokens"] + made,
        },
    }
    response = {"status_code": 200, "request_id": key, "body": body}
    return {"id": key, "custom_id": first["id"], "response": response, "error": None}


def _choice(sample: Row, endpoint: str, text: TokenText) -> dict[str, Any]:
    content: dict[str, Any] = {"text": sample["text"]}
    logprobs: dict[str, Any] | None = None
    reason = sample["finish_reason"]
    if endpoint == "chat":
        content = {"message": {"role": "assistant", **_said(sample)}}
        reason = "tool_calls" if reason == "stop" and sample.get("tool_calls") else reason
    if sample.get("logprobs") is not None:
        tokens = list(_tokens(sample, text))
        logprobs = {"content": list(map(_chat_token, tokens))} if endpoint == "chat" else _completion_tokens(tokens)
    return {"index": sample["sample"], **content, "logprobs": logprobs, "finish_reason": reason}


def _said(sample: Row) -> dict[str, Any]:
    """Return what a message says: its text, or the text's parts. Reasoning has both names that there are for it."""
    reasoning, calls = sample.get("reasoning"), sample.get("tool_calls")
    said = {"content": sample["content"] if reasoning or calls else sample["text"]}
    if reasoning:
        said |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return said | ({"tool_calls": calls} if calls else {})


def _tokens(sample: Row, text: TokenText) -> Iterator[_TokenEntry]:
    ids: np.ndarray | None = sample.get("top_token_ids")
    values: np.ndarray | None = sample.get("top_logprobs")
    for at, (token, value) in enumerate(zip(sample["token_ids"], sample["logprobs"], strict=True)):
        pairs = (
            zip(ids[at].tolist(), values[at].tolist(), strict=True) if ids is not None and values is not None else ()
        )
        yield _TokenEntry(text(int(token)), float(value), [(text(i), v) for i, v in pairs if not isnan(v)])


def _chat_token(token: _TokenEntry) -> dict[str, Any]:
    return {
        **_with_bytes(token.text, token.logprob),
        "top_logprobs": [_with_bytes(text, logprob) for text, logprob in token.top],
    }


def _with_bytes(text: str, logprob: float) -> dict[str, Any]:
    """Return a token of a chat; its `bytes` are null if the token is a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _completion_tokens(tokens: list[_TokenEntry]) -> dict[str, Any]:
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token.text))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{**dict(token.top), token.text: token.logprob} for token in tokens],
        "text_offset": offsets[:-1],
    }


def _refusal(error: dict[str, Any]) -> dict[str, Any]:
    reason = {"code": "invalid_request", "message": error["reason"]}
    return {"id": f"hpcdecode-{error['line']}", "custom_id": error["id"], "response": None, "error": reason}
