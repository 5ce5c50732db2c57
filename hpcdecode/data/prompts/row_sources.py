"""The prompt of a row in its three forms: a text, token ids and messages."""

from __future__ import annotations

from typing import Any

from hpcdecode.data.prompts.messages import checked_messages
from hpcdecode.data.prompts.row_template import SOURCES
from hpcdecode.errors import RowProblem
from hpcdecode.requests.values import is_integer, shown, type_name

MAX_TOKEN_ID = 2**31 - 1


def source_of(fields: dict[str, Any]) -> str:
    """Return the one of SOURCES that a row has. Raises RowProblem if it has none or several."""
    given = [name for name in SOURCES if fields.get(name) is not None]
    if len(given) != 1:
        raise RowProblem(f"expected exactly one of {', '.join(SOURCES)}, got {' and '.join(given) or 'none of them'}")
    return given[0]


def text_of(fields: dict[str, Any]) -> str:
    """Return the text of a row's prompt. Raises RowProblem if it is no text, or empty."""
    value = fields["prompt"]
    if not isinstance(value, str):
        raise RowProblem(f"prompt: expected a string, got {type_name(value)} {shown(value)}")
    if not value:
        raise RowProblem("prompt: expected a string that is not empty, got an empty one")
    return value


def token_ids_of(fields: dict[str, Any]) -> list[int]:
    """Return the token ids of a row's prompt. Raises RowProblem if they are none."""
    value = _filled_list(fields, "prompt_token_ids", "token ids")
    for index, token in enumerate(value):
        if not is_integer(token) or not 0 <= token <= MAX_TOKEN_ID:
            got = f"{type_name(token)} {shown(token)} at index {index}"
            raise RowProblem(f"prompt_token_ids: expected integers in [0, {MAX_TOKEN_ID}], got {got}")
    return value


def messages_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row as chat templates read them. Raises RowProblem if they have a wrong form."""
    return checked_messages(_filled_list(fields, "messages", "messages"))


def _filled_list(fields: dict[str, Any], name: str, what: str) -> list[Any]:
    value = fields[name]
    if not isinstance(value, list):
        raise RowProblem(f"{name}: expected a list of {what}, got {type_name(value)} {shown(value)}")
    if not value:
        raise RowProblem(f"{name}: expected at least one element, got an empty list")
    return value


def renamed(fields: dict[str, Any], column: str | None) -> dict[str, Any]:
    """Return the fields with `column` renamed to the source that its value is: a prompt, messages or token ids."""
    if column is None or column in SOURCES:
        return fields
    if (value := fields.get(column)) is None:
        raise RowProblem(f"{column}: expected the prompt (--prompt-column), got none")
    others = {name: v for name, v in fields.items() if name != column and name not in SOURCES}
    if not isinstance(value, list):
        return {**others, "prompt": value}
    return {**others, "messages" if value and isinstance(value[0], dict) else "prompt_token_ids": value}
