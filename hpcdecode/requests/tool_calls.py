"""Finds the calls of tools in generated text, in the forms of several model families.

What is no well-formed call stays in the content as it is.

Sources: the chat templates of Hermes 2 Pro and Qwen (`hermes`), Llama 3.1 (`llama3_json`), Mistral's tokenizer
versions 3, 7 and 11 (`mistral`). The names are vLLM's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, NoReturn

MOST_CALLS = 256  # in a text; more stay in the content
MOST_TRIES = 1024  # places in a text that are looked at, since an error of the JSON decoder reads all that is before it


class Call(NamedTuple):
    """A call of a tool.

    Attributes:
        name: Name of the function.
        arguments: Its arguments, a JSON object as text.
        id: The id that the model gave it; None for none.
    """

    name: str
    arguments: str
    id: str | None = None


Found = tuple[str, list[Call]]  # content, and the calls that are not in it
Extract = Callable[[str], Found]


def hermes(text: str) -> Found:
    """Return content and calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return _cut(text, re.compile(r"<tool_call>\s*"), _hermes_call)


def _hermes_call(text: str, start: int) -> tuple[list[Call], int] | None:
    value, end = _json_at(text, start)
    closed = re.compile(r"\s*(</tool_call>|\Z)").match(text, end)
    return None if closed is None else ([call_of(value, "arguments")], closed.end())


def llama3_json(text: str) -> Found:
    """Return content and calls if all of the text is `{"name": ..., "parameters": {...}}`, or several after `;`."""
    calls: list[Call] = []
    at = re.compile(r"\s*(<\|python_tag\|>)?\s*").match(text)
    place = at.end() if at else 0
    try:
        while text.startswith("{", place) and len(calls) < MOST_CALLS:
            value, place = _json_at(text, place)
            calls.append(call_of(value, "parameters", "arguments"))
            between = re.compile(r"\s*;?\s*").match(text, place)
            place = between.end() if between else place
    except ValueError:
        return text, []
    return ("", calls) if calls and place == len(text) else (text, [])


def mistral(text: str) -> Found:
    """Return content and calls after `[TOOL_CALLS]`.

    They are a JSON list of objects with `name` and `arguments`, or `name[ARGS]{...}`, perhaps with a `[CALL_ID]`.
    """
    return _cut(text, re.compile(r"\[TOOL_CALLS\]\s*"), _mistral_calls)


def _mistral_calls(text: str, start: int) -> tuple[list[Call], int] | None:
    if text.startswith(("[", "{"), start):
        value, end = _json_at(text, start)
        calls = [call_of(each, "arguments") for each in (value if isinstance(value, list) else [value])]
        return (calls, end) if 0 < len(calls) <= MOST_CALLS else None
    named = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\])?\s*").match(text, start)
    if named is None:
        return None
    value, end = _json_at(text, named.end())
    return [call_of({"name": named[1], "arguments": value, "id": named[2]}, "arguments")], end


def _cut(text: str, begin: re.Pattern[str], parse: Callable[[str, int], tuple[list[Call], int] | None]) -> Found:
    """Return the text without its calls, and the calls.

    Args:
        text: The text.
        begin: What comes before calls.
        parse: Returns the calls from a position on and their end, None or ValueError if there is no call.
    """
    content: list[str] = []
    calls: list[Call] = []
    done = 0
    for match in islice(begin.finditer(text), MOST_TRIES):
        if match.start() < done or len(calls) >= MOST_CALLS:
            continue
        try:
            found = parse(text, match.end())
        except ValueError:
            continue
        if found is not None:
            content.append(text[done : match.start()])
            calls += found[0]
            done = found[1]
    return ("".join(content) + text[done:]).strip() if calls else text, calls


def call_of(value: Any, *names: str) -> Call:
    """Return the call that an object states, whose arguments are the first of these keys that it has.

    Raises:
        ValueError: It states none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("expected an object with a name")
    arguments = next((value[name] for name in names if name in value), None)
    if isinstance(arguments, str):  # JSON in JSON
        arguments = decoded(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("expected arguments in an object")
    own = value.get("id")
    value["name"].encode()  # UnicodeEncodeError is a ValueError
    return Call(value["name"], _encoded(arguments), own if isinstance(own, str) and own.isascii() else None)


def _encoded(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, written as an escape
        return json.dumps(arguments, allow_nan=False)
    return text


def decoded(text: str) -> Any:
    """Return the value of JSON text. Raise ValueError if it is none."""
    value, end = _json_at(text, len(text) - len(text.lstrip()))
    if text[end:].strip():
        raise ValueError("expected one JSON value")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not in JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a position, and its end. Raise ValueError if there is none."""
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("expected JSON that is not so deep") from None
