"""Conversations of rows: messages in the forms of the OpenAI API, checked, and how they are rendered."""

from __future__ import annotations

from typing import Any

import msgspec

from hpcdecode.data.prompts.values import shown, type_name
from hpcdecode.errors import RowProblem

CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_OURS = frozenset(("messages", "tools", "conversation", "chat_template", "tokenize", *CHAT_FIELDS))
_REASONING = ("reasoning_content", "thinking", "reasoning")  # an assistant's message may have one of them alone
_REFUSED = ("function_call", "refusal", "audio")  # of a message, unless null


class ChatOptions(msgspec.Struct, frozen=True):
    """How messages become a prompt.

    Attributes:
        add_generation_prompt: end where the assistant's answer begins.
        continue_final_message: end where the final message ends, which the model continues.
        variables: more variables of the chat template (`chat_template_kwargs`).
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}


DEFAULT_CHAT = ChatOptions()


def chat_options(fields: dict[str, Any]) -> ChatOptions:
    """Return the chat fields of a row, under the names and with the defaults of vLLM; null is as good as absent.

    Raises RowProblem for a value of a wrong type, for both of the booleans true, and for a row without messages.
    """
    given = {name: fields[name] for name in CHAT_FIELDS if fields.get(name) is not None}
    if not given:
        return DEFAULT_CHAT
    add = _boolean(given, "add_generation_prompt", True)
    proceed = _boolean(given, "continue_final_message", False)
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise RowProblem(f"chat_template_kwargs: expected an object, got {type_name(variables)} {shown(variables)}")
    for name in sorted(_OURS & variables.keys()):
        raise RowProblem(f"chat_template_kwargs: expected names of the template's own, got {name!r}; remove it")
    options = ChatOptions(add, proceed, variables)
    if fields.get("messages") is None:
        if options != DEFAULT_CHAT:
            raise RowProblem(f"{' and '.join(given)}: expected beside messages, got a row without them")
    elif proceed and add:
        raise RowProblem(
            "add_generation_prompt: expected false beside continue_final_message, got true"
            f'{"" if "add_generation_prompt" in given else " (the default)"}; add "add_generation_prompt": false'
        )
    return options


def checked_messages(value: list[Any]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them; raises RowProblem.

    Fields that are null are left out, parts of a content are text, and arguments of tool calls are objects.
    """
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowProblem(f"{place}: expected an object, got {type_name(message)} {shown(message)}")
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowProblem(f"{place}.role: expected a string, got {type_name(role)} {shown(role)}")
    for name in _REFUSED:
        if name in message:
            raise RowProblem(f"{place}.{name}: not supported yet, got {shown(message[name])}; remove the field")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(f"{place}.tool_calls", message["tool_calls"])
        if not message["tool_calls"]:
            del message["tool_calls"]
    if "content" in message:
        message["content"] = _content(f"{place}.content", message["content"])
    elif role != "assistant" or not any(name in message for name in ("tool_calls", *_REASONING)):
        raise RowProblem(f"{place}.content: expected a string or a list of parts, got null")
    return message


def _content(place: str, content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        got = f"{type_name(content)} {shown(content)}"
        raise RowProblem(f"{place}: expected a string or a list of parts, got {got}")
    return [_part(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _part(place: str, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise RowProblem(f"{place}: expected an object with type and text, got {type_name(part)} {shown(part)}")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        got = f"type {shown(kind)}" if kind is not None else "no type"
        raise RowProblem(f'{place}: expected a part of type "text", the only one supported, got {got}')
    if not isinstance(text, str):
        raise RowProblem(f"{place}.text: expected a string, got {type_name(text)} {shown(text)}")
    return part


def _tool_calls(place: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowProblem(f"{place}: expected a list of calls, got {type_name(calls)} {shown(calls)}")
    return [_tool_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(f"{place}: expected an object with function.name, got {type_name(call)} {shown(call)}")
    arguments = _arguments(f"{place}.function.arguments", function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(place: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call, which the OpenAI API has as text, as an object (as vLLM does)."""
    if arguments in (None, ""):
        return {}
    decoded = arguments
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            decoded = None
    if not isinstance(decoded, dict):
        raise RowProblem(
            f"{place}: expected an object, or one as JSON text, got {type_name(arguments)} {shown(arguments)}"
        )
    return decoded


def _boolean(given: dict[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise RowProblem(f"{name}: expected true or false, got {type_name(value)} {shown(value)}")
    return value
