"""Conversations of rows: checks messages in the forms of the OpenAI API, and the options of their rendering."""

from __future__ import annotations

from typing import Any

import msgspec

from hpcdecode.errors import RowProblem
from hpcdecode.requests.values import shown, type_name

CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "tool_choice")
_RESERVED_VARIABLES = frozenset(("messages", "conversation", "chat_template", "tokenize", *CHAT_FIELDS))
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # instead of the content of an assistant's message
_UNSUPPORTED_FIELDS = ("function_call", "refusal", "audio")  # of a message, unless null


class ChatOptions(msgspec.Struct, frozen=True):
    """Options for rendering messages to a prompt.

    Attributes:
        add_generation_prompt: The prompt ends where the assistant's answer begins.
        continue_final_message: The prompt ends where the final message ends, so that the model continues it.
        variables: Further variables of the chat template (`chat_template_kwargs`).
        tools: Functions that the model may call, as the OpenAI API describes them; None for none.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None


DEFAULT_CHAT = ChatOptions()


def chat_options(fields: dict[str, Any]) -> ChatOptions:
    """Return the chat fields of a row, which have the names and defaults of vLLM. A null field is ignored.

    Raises:
        RowProblem: A value has a wrong type, both booleans are true, or the row has no messages.
    """
    given = {name: fields[name] for name in CHAT_FIELDS if fields.get(name) is not None}
    if not given:
        return DEFAULT_CHAT
    add_prompt = _boolean(given, "add_generation_prompt", True)
    continue_final = _boolean(given, "continue_final_message", False)
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise RowProblem(f"chat_template_kwargs: expected an object, got {type_name(variables)} {shown(variables)}")
    for name in sorted(_RESERVED_VARIABLES & variables.keys()):
        raise RowProblem(f"chat_template_kwargs: expected names of the template's own, got {name!r}; remove it")
    options = ChatOptions(add_prompt, continue_final, variables, _tools(given))
    if fields.get("messages") is None:
        if options != DEFAULT_CHAT:
            raise RowProblem(f"{' and '.join(given)}: expected beside messages, got a row without them")
    elif continue_final and add_prompt:
        raise RowProblem(
            "add_generation_prompt: expected false beside continue_final_message, got true"
            f'{"" if "add_generation_prompt" in given else " (the default)"}; add "add_generation_prompt": false'
        )
    return options


def checked_messages(value: list[Any]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates read.

    Null fields are left out. Parts of a content become text parts. Arguments of tool calls become objects.

    Raises:
        RowProblem: A message has a wrong form or an unsupported field.
    """
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowProblem(f"{place}: expected an object, got {type_name(message)} {shown(message)}")
    given: dict[str, Any] = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise RowProblem(f"{place}.role: expected a string, got {type_name(role)} {shown(role)}")
    for name in _UNSUPPORTED_FIELDS:
        if name in given:
            raise RowProblem(f"{place}.{name}: not supported yet, got {shown(given[name])}; remove the field")
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(f"{place}.tool_calls", given["tool_calls"])
        if not given["tool_calls"]:
            del given["tool_calls"]
    if "content" in given:
        given["content"] = _content(f"{place}.content", given["content"])
    elif role != "assistant" or not any(name in given for name in ("tool_calls", *_REASONING_FIELDS)):
        raise RowProblem(f"{place}.content: expected a string or a list of parts, got null")
    return given


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
    """Return the arguments of a tool call as an object, as vLLM does. The OpenAI API has them as JSON text."""
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


def _tools(given: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a row; None without any, or if `tool_choice` is none."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RowProblem(f"tool_choice: expected auto or none, the only ones supported, got {shown(choice)}")
    if not isinstance(tools, list):
        raise RowProblem(f"tools: expected a list of functions, got {type_name(tools)} {shown(tools)}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            got = f"{type_name(tool)} {shown(tool)}"
            raise RowProblem(f"tools[{index}]: expected an object with type function and function.name, got {got}")
    return tools if tools and choice == "auto" else None


def _boolean(given: dict[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise RowProblem(f"{name}: expected true or false, got {type_name(value)} {shown(value)}")
    return value
