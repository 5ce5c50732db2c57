"""Reads the messages of gpt-oss: `<|channel|>NAME to=TOOL <|constrain|>json<|message|>TEXT<|end|>`, one after another.

Source: the guide to the harmony response format that OpenAI published with the models.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcdecode.requests.tool_calls import Call, Found, call_of, decoded

_MESSAGE = re.compile(
    r"(?:<\|start\|>(?P<role>[^<]*))?<\|channel\|>(?P<header>(?:[^<]|<\|constrain\|>)*)<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>|<\|channel\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class _ChannelMessage(NamedTuple):
    """A message: its channel, its recipient or an empty text, its text, and all that stands for it."""

    channel: str
    recipient: str
    body: str
    raw: str

    @property
    def is_call(self) -> bool:
        return self.recipient.startswith(_FUNCTIONS)


def _messages(text: str) -> list[_ChannelMessage | str]:
    """Return the messages of a text, and what lies between them."""
    found: list[_ChannelMessage | str] = []
    done = 0
    for match in _MESSAGE.finditer(text):
        header = match["header"].replace("<|constrain|>", " ")
        recipient = _RECIPIENT.search(header) or _RECIPIENT.search(match["role"] or "")
        channel = header.split()[0] if header.split() else ""
        found += [text[done : match.start()]] if match.start() > done else []
        found.append(_ChannelMessage(channel, recipient[1] if recipient else "", match["body"], match[0]))
        done = match.end()
    return found + ([text[done:]] if done < len(text) else [])


def reasoning(text: str) -> tuple[str, str]:
    """Return the text of the channel analysis, and the rest: texts of other channels, and calls as they are."""
    thoughts, rest = [], []
    for part in _messages(text):
        if isinstance(part, str):
            rest.append(part)
        elif part.is_call:
            rest.append(part.raw)
        elif part.channel == "analysis":
            thoughts.append(part.body)
        else:
            rest.append(part.body if not part.recipient else part.raw)
    return "\n".join(thoughts), "".join(rest)


def tool_calls(text: str) -> Found:
    """Return the text without its calls, and the calls, whose recipient is `functions.NAME`."""
    content, calls = [], []
    for part in _messages(text):
        call = _call(part) if isinstance(part, _ChannelMessage) and part.is_call else None
        if call is None:
            content.append(part if isinstance(part, str) else part.raw)
        else:
            calls.append(call)
    return "".join(content) if calls else text, calls


def _call(message: _ChannelMessage) -> Call | None:
    try:
        arguments = decoded(message.body) if message.body.strip() else {}
        return call_of({"name": message.recipient.removeprefix(_FUNCTIONS), "arguments": arguments}, "arguments")
    except ValueError:
        return None
