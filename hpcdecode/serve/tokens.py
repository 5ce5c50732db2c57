"""The routes `/tokenize` and `/detokenize`, in vLLM's forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from hpcdecode.data.prompts.batch_format import HARMLESS
from hpcdecode.data.prompts.files import RawRow
from hpcdecode.data.prompts.messages import CHAT_FIELDS
from hpcdecode.data.prompts.row_sources import token_ids_of
from hpcdecode.data.prompts.rows import RowError, RowReader
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import RowProblem
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.values import shown, suggestion, type_name
from hpcdecode.serve.bodies import json_object, model_of
from hpcdecode.serve.context import Context
from hpcdecode.serve.errors import unusable
from hpcdecode.serve.failures import errors
from hpcdecode.serve.schema import detokenize_body, json_body, tokenize_body

TOKENIZE_FIELDS = ("prompt", "messages", "add_special_tokens", "return_token_strs", *CHAT_FIELDS)
DETOKENIZE_FIELDS = ("tokens",)


def tokens_router(context: Context) -> APIRouter:
    """Return the routes that turn text to tokens and back."""
    router = APIRouter()

    failures = errors(400, 401, 404, 413)

    @router.post("/tokenize", openapi_extra=json_body(tokenize_body(context.names)), responses=failures)
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a prompt, or of messages."""
        return await _answered(request, context, tokens_of, TOKENIZE_FIELDS)

    @router.post("/detokenize", openapi_extra=json_body(detokenize_body(context.names)), responses=failures)
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await _answered(request, context, text_of, DETOKENIZE_FIELDS)

    return router


async def _answered(request: Request, context: Context, work: Any, known: tuple[str, ...]) -> Response:
    body = json_object(await request.body())
    model_of(body, context)
    try:
        for name in sorted(body.keys() - set(known) - HARMLESS):
            raise RowProblem(f"{name}: expected fields that are known, got this one{suggestion(name, known)}")
        made = await context.hub.read(partial(work, body, context.tokenizer))
    except RowProblem as problem:
        raise unusable(problem) from problem
    answer = made if "prompt" in made else {**made, "max_model_len": context.max_model_len}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def tokens_of(body: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the answer of `/tokenize`.

    Raises:
        RowProblem: A field cannot be used.
    """
    special, strings = (_boolean(body, name) for name in ("add_special_tokens", "return_token_strs"))
    messages = body.get("messages") is not None
    if not messages and body.get("prompt") == "":
        ids = _encoded(tokenizer, "", special is not False)
    else:
        reader = RowReader()
        reader.unknown.quiet = True
        row = reader.read(RawRow(1, "", body), SamplingParams())
        if isinstance(row, RowError):
            raise RowProblem(row.reason)
        ids = _encoded(tokenizer, tokenizer.text(row), special is not False if not messages else special is True)
    names = tokenizer.backend.convert_ids_to_tokens(ids) if strings else None
    return {"count": len(ids), "tokens": ids, "token_strs": names}


def _encoded(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    return tokenizer.encode_any([text], add_special_tokens=special)[0]


def _boolean(body: dict[str, Any], name: str) -> bool | None:
    value = body.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise RowProblem(f"{name}: expected true or false, got {type_name(value)} {shown(value)}")
    return value


def text_of(body: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the answer of `/detokenize`.

    Raises:
        RowProblem: There are no tokens, or some are not in the vocabulary.
    """
    given = body.get("tokens")
    if given == []:
        return {"prompt": ""}
    try:
        ids = tokenizer.checked(token_ids_of({"prompt_token_ids": given}))
    except RowProblem as problem:
        raise RowProblem(str(problem).replace("prompt_token_ids", "tokens", 1)) from None
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}
