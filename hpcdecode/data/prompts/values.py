"""How error messages and tables show a value of a row: on one line, with what `requests.values` has for that."""

from __future__ import annotations

from hpcdecode.requests.values import MAX_SHOWN_CHARACTERS, is_integer, shown, type_name

__all__ = ["MAX_SHOWN_CHARACTERS", "is_integer", "printable", "shown", "type_name"]


def printable(text: object) -> str:
    """Return `text` on one line, with characters that cannot be printed as backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
