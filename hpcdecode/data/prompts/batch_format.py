"""Requests of the OpenAI batch format, turned into rows: each field of a request is honoured, ignored or refused.

A field is ignored if it cannot change the text. It is refused if it would change the text and is not supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

from hpcdecode.data.prompts.fields import LORA, asks_for_nothing
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.requests.values import shown, suggestion, type_name
from hpcdecode.system.model_path import short_names

ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
LINE_FIELDS = frozenset(("id", "custom_id", "method", "url", "body"))

# Fields that are ignored: they change neither the text nor its form.
HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "parallel_tool_calls", "stream_options"),
        *("request_id", "priority", "cache_salt"),  # of vLLM
    )
)
# Fields that are refused, with the values that ask for nothing. The value of a field that is not listed is False.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "suffix": ("",),
    "verbosity": ("medium",),
}


def is_request(fields: dict[str, Any]) -> bool:
    """Return whether a line is a request of the batch format.

    Args:
        fields: Fields of the line, none of them a prompt.
    """
    return "body" in fields and "url" in fields


def request_fields(
    fields: dict[str, Any], model: str | None, known: Set[str], adapters: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the fields of a request as the fields of a plain row.

    Args:
        fields: Fields of the line.
        model: Directory of the job's model, which the request may name. None accepts any name.
        known: Names of the fields that a plain row may have.
        adapters: Names of adapters, any of which the request may name in place of the model.

    Raises:
        RowProblem: The line, or a field of the request's body, cannot be honoured.
    """
    url, body = fields.get("url"), fields["body"]
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise RowProblem(f"url: expected {' or '.join(ENDPOINTS)}, got {type_name(url)} {shown(url)}")
    if fields.get("method", "POST") != "POST":
        raise RowProblem(f"method: expected POST, got {shown(fields['method'])}")
    if not isinstance(body, dict):
        raise RowProblem(f"body: expected an object, got {type_name(body)} {shown(body)}")
    source = ENDPOINTS[url]
    if body.get(source) is None:
        raise RowProblem(f"body: expected {source} for {url}, got none")
    body = choosing(body, adapters)
    _check_model(body.get("model"), model, adapters)
    _check_fields(body, known, source)
    if source == "prompt" and isinstance(body["prompt"], list):
        return {**{k: v for k, v in body.items() if k != "prompt"}, "prompt_token_ids": body["prompt"]}
    return body


def choosing(body: dict[str, Any], adapters: Sequence[str]) -> dict[str, Any]:
    """Return the body with the adapter that it names as its model as its field `lora`.

    Raises:
        RowProblem: It has another one there.
    """
    if (named := body.get("model")) not in adapters:
        return body
    if body.get(LORA) not in (None, "", named):
        raise RowProblem(f"{LORA}: expected {named}, as model is, got {shown(body[LORA])}; remove one of them")
    return {**{name: value for name, value in body.items() if name != "model"}, LORA: named}


def _check_fields(body: dict[str, Any], known: Set[str], source: str) -> None:
    """Raise RowProblem if a field of a request's body can be neither honoured nor ignored."""
    adds_special_tokens = source == "prompt"  # vLLM adds none to messages, since the chat template writes them
    for name in body.keys() - known - HARMLESS - {"model"}:
        neutral = (adds_special_tokens,) if name == "add_special_tokens" else NEUTRAL.get(name, (False,))
        if not asks_for_nothing(body[name], neutral):
            raise RowProblem(f"{name}: {_expected(name, known)}")


def _expected(name: str, known: Set[str]) -> str:
    hint = suggestion(name, sorted(known))
    if name in ("reasoning_effort", "documents"):
        hint = "; if the model's chat template reads it, give it in chat_template_kwargs"
    return f"expected fields of a request that are supported, got this one{hint or '; remove it'}"


def _check_model(named: Any, model: str | None, adapters: Sequence[str]) -> None:
    """Raise RowProblem if a request names another model than the job's, as a server would refuse it."""
    if named is None or model is None:
        return
    if not isinstance(named, str):
        raise RowProblem(f"model: expected a string, got {type_name(named)} {shown(named)}")
    if not is_named(named, model):
        names = " or ".join((*sorted(model_names(model)), *adapters))
        raise RowProblem(
            f"model: expected {names} (the job's model, on the hub or as a directory),"
            f" got {shown(named)}; change or remove it"
        )


def is_named(named: str, model: str) -> bool:
    """Return whether a request's name of a model means the one in the directory `model`."""
    last = named.rstrip("/").rpartition("/")[2]
    return named == model or last.casefold() in map(str.casefold, model_names(model))


def require_adapter_names(adapters: Iterable[str], model: str) -> None:
    """Raise UserError if an adapter has a name of the model in the directory `model`: requests name either."""
    for name in adapters:
        if is_named(name, model):
            raise UserError(
                f"--lora {name}=DIR: expected another name than the model's, as requests name one of them as their "
                f"model, got {name!r} for an adapter of {model}; choose another one",
                everywhere=True,
            )


def model_names(model: str) -> frozenset[str]:
    """Return the names under which requests may ask for the model in the directory `model`.

    They are compared without regard to case. A directory of the hub's cache also has the name of its repository.
    """
    paths = (Path(model).absolute(), Path(model).resolve())
    names = {path.name for path in paths}
    for folder in (folder for path in paths for folder in path.parts):
        if folder.startswith("models--"):  # a folder of the hub's cache
            names.add(folder.rpartition("--")[2])
    return frozenset(names | short_names(paths[1]))
