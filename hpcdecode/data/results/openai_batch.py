"""The output of an OpenAI batch: turns each row of the results into the answer to its request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.layout import ADAPTER
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
from hpcdecode.data.results.read import Results
from hpcdecode.errors import UserError

Row = dict[str, Any]


def answers(results: Results, rows: Iterable[Row], endpoint: str, name: str = "") -> Iterator[dict[str, Any]]:
    """Yield an answer for each row and each row that could not be used, by line of the prompt file.

    Tokens with log-probabilities are shown as text if the model's tokenizer is still at the job's path, else in the
    form `token_id:17`.

    Args:
        results: The results file.
        rows: Its rows, by line and sample.
        endpoint: A key of OBJECTS.
        name: Of the model, for answers of rows without an adapter; empty for that of its directory.
    """
    model = results.attributes.get("model")
    path = str(model.get("path", "")) if isinstance(model, dict) else ""
    text = _token_text(path) if "logprobs" in results.columns else str
    chose = ADAPTER in results.columns and ADAPTER not in results.inputs.names
    errors = iter(results.errors())
    error = next(errors, None)
    for line, samples in groupby(rows, key=itemgetter("line")):
        while error is not None and error["line"] < line:
            yield _refusal(error)
            error = next(errors, None)
        found = list(samples)
        yield _answer(found, (chose and found[0][ADAPTER]) or name or Path(path).name, endpoint, text)
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
        "usage": usage(first["prompt_tokens"], made),
    }
    response = {"status_code": 200, "request_id": key, "body": body}
    return {"id": key, "custom_id": first["id"], "response": response, "error": None}


def _choice(sample: Row, endpoint: str, text: TokenText) -> dict[str, Any]:
    made: dict[str, Any] = {"text": sample["text"]}
    logprobs: dict[str, Any] | None = None
    reason = sample["finish_reason"]
    if endpoint == "chat":
        calls = sample.get("tool_calls")
        parts = said(sample["text"], sample.get("content"), sample.get("reasoning"), calls)
        made = {"message": {"role": "assistant", **parts}}
        reason = chat_finish_reason(reason, calls)
    if sample.get("logprobs") is not None:
        entries = _entries(sample, text)
        logprobs = chat_logprobs(entries) if endpoint == "chat" else completion_logprobs(entries)
    return {"index": sample["sample"], **made, "logprobs": logprobs, "finish_reason": reason}


def _entries(sample: Row, text: TokenText) -> list[TokenEntry]:
    tokens, chosen = (sample[name].tolist() for name in ("token_ids", "logprobs"))
    top_ids, top = sample.get("top_token_ids"), sample.get("top_logprobs")
    if top_ids is None or top is None:
        none: list[list[Any]] = [[]] * len(tokens)
        return token_entries(tokens, chosen, none, none, text)
    return token_entries(tokens, chosen, top_ids.tolist(), top.tolist(), text)


def _refusal(error: dict[str, Any]) -> dict[str, Any]:
    reason = {"code": "invalid_request", "message": error["reason"]}
    return {"id": f"hpcdecode-{error['line']}", "custom_id": error["id"], "response": None, "error": reason}
