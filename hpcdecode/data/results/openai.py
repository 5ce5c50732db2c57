"""The answers to an OpenAI batch, from results: one line a request, of chats or of completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from math import isnan
from operator import itemgetter
from pathlib import Path
from typing import Any

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.read import Results
from hpcdecode.errors import UserError

OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}

Row = dict[str, Any]
TokenText = Callable[[int], str]


def answers(results: Results, rows: Iterable[Row], endpoint: str) -> Iterator[dict[str, Any]]:
    """A line for every row and for every row that could not be used, by line of the prompt file.

    Tokens with log-probabilities are given as text where the model's tokenizer is still where the job had it, else as
    `token_id:17`.
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
    said, logprobs = {"text": sample["text"]}, None
    if endpoint == "chat":
        said = {"message": {"role": "assistant", "content": sample["text"]}}
    if sample.get("logprobs") is not None:
        steps = [(token, value, list(top)) for token, value, top in _steps(sample, text)]
        logprobs = {"content": list(map(_chat_token, steps))} if endpoint == "chat" else _completion_tokens(steps)
    return {"index": sample["sample"], **said, "logprobs": logprobs, "finish_reason": sample["finish_reason"]}


Step = tuple[str, float, list[tuple[str, float]]]  # a token, its log-probability, and the most likely ones with theirs


def _steps(sample: Row, text: TokenText) -> Iterator[Step]:
    ids, values = sample.get("top_token_ids"), sample.get("top_logprobs")
    for at, (token, value) in enumerate(zip(sample["token_ids"], sample["logprobs"], strict=True)):
        pairs = () if ids is None else zip(ids[at].tolist(), values[at].tolist(), strict=True)
        yield text(int(token)), float(value), [(text(i), v) for i, v in pairs if not isnan(v)]


def _chat_token(step: Step) -> dict[str, Any]:
    token, value, top = step
    return {**_with_bytes(token, value), "top_logprobs": [_with_bytes(*pair) for pair in top]}


def _with_bytes(token: str, value: float) -> dict[str, Any]:
    """`bytes` is null where the token is a part of a character."""
    return {"token": token, "logprob": value, "bytes": None if "\ufffd" in token else list(token.encode())}


def _completion_tokens(steps: list[Step]) -> dict[str, Any]:
    offsets = [0]
    for token, *_ in steps:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": [token for token, *_ in steps],
        "token_logprobs": [value for _, value, _ in steps],
        "top_logprobs": [{**dict(top), token: value} for token, value, top in steps],
        "text_offset": offsets[:-1],
    }


def _refusal(error: dict[str, Any]) -> dict[str, Any]:
    reason = {"code": "invalid_request", "message": error["reason"]}
    return {"id": f"hpcdecode-{error['line']}", "custom_id": error["id"], "response": None, "error": reason}
