"""How messages and tables show a value: its JSON type, and the value on one line; and names that resemble one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

MAX_SHOWN_CHARACTERS = 60
_SIMILARITY = 0.8  # of two names, by difflib


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


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` resembles most, or None if it resembles none."""
    normalized = name[:MAX_SHOWN_CHARACTERS].lower().replace("-", "_")
    found = difflib.get_close_matches(normalized, list(known), 1, _SIMILARITY)
    return found[0] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'NAME'?`, or an empty text if `name` resembles no known name."""
    found = nearest(name, known)
    return f"; did you mean {found!r}?" if found else ""


def _digits(value: int) -> str:
    return str(value) if value.bit_length() < 512 else f"of {value.bit_length()} bits"
