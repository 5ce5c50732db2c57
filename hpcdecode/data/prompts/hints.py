"""Suggests which column holds the prompts, for messages about rows without any."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from hpcdecode.requests.values import printable

_SHOWN_COLUMNS = 20
_USUAL = ("question", "instruction", "input", "query", "text", "content", "problem", "conversations", "conversation")


def columns_hint(columns: Sequence[str], usable: Collection[str] | None = None) -> str:
    """Return the names of columns and how to make prompts of them; an empty text if there are none.

    Args:
        columns: Names of the columns that rows have.
        usable: Those of them that have texts or lists; None if that is not known.
    """
    if not columns:
        return ""
    names = printable(", ".join(islice(columns, _SHOWN_COLUMNS)))
    more = f" and {len(columns) - _SHOWN_COLUMNS} more" if len(columns) > _SHOWN_COLUMNS else ""
    return f"; columns: {names}{more}{flags_hint(columns if usable is None else usable)}"


def flags_hint(columns: Iterable[str]) -> str:
    """Return the flags that make prompts of the likeliest column of some; an empty text if there are none."""
    best = _likely(columns)
    if best is None:
        return ""
    return f"; use --prompt-column {_quoted(best)} or --prompt-template '...{_variable(best)}...'"


def _likely(names: Iterable[str]) -> str | None:
    """Return the name that is most likely that of the prompts, or None if there are none."""
    found = {name.casefold(): name for name in reversed([n for n in names if n not in ("id", "custom_id")])}
    usual = next((found[name] for name in _USUAL if name in found), None)
    return usual or next(reversed(found.values()), None)


def _variable(name: str) -> str:
    return f"{{{{ {name} }}}}" if name.isidentifier() else f'{{{{ row["{printable(name)}"] }}}}'


def _quoted(name: str) -> str:
    plain = printable(name)
    return plain if plain.isidentifier() else f"'{plain}'"
