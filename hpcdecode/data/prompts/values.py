"""How error messages show a value of a row: its JSON type, and the value on one line of bounded length."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_SHOWN_CHARACTERS = 60


def is_integer(value: Any) -> bool:
    """Return whether a value is an int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def type_name(value: Any) -> str:
    """Return the JSON type of a decoded value with its article, such as `an object`."""
    if isinstance(value, bool):
        return "a boolean"
    words = {dict: "an object", list: "a list", tuple: "a list", str: "a string", int: "an integer", float: "a float"}
    return "null" if value is None else words.get(type(value), f"a {type(value).__name__}")


def shown(value: Any) -> str:
    """Return a decoded value as JSON of at most MAX_SHOWN_CHARACTERS; for a container, only its length."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARACTERS + 1].encode("utf-8", "backslashreplace").decode()
    elif isinstance(value, (list, tuple, dict)):
        return f"of {len(value)} elements"
    text = _digits(value) if is_integer(value) else msgspec.json.encode(value, enc_hook=repr).decode()
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "..."


def printable(text: object) -> str:
    """Return `text` on one line, with characters that cannot be printed as backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _digits(value: int) -> str:
    return str(value) if value.bit_length() < 512 else f"of {value.bit_length()} bits"
