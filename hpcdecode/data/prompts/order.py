"""The order in which rows are worked on: those whose prompts begin alike follow each other, and share their K and V.

Prompt files often ask many questions about each of many documents, question by question. By the time that a document
comes again its K and V are gone. Prefix-first order is that of BatchLLM (Zheng et al. 2024, arXiv 2412.03594), here
within a window of rows that are read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from hpcdecode.data.prompts.rows import Row, RowError

_WINDOW_ROWS = 1 << 16
_WINDOW_BYTES = 1 << 27  # of texts, and of what is kept of rows
_ID_BYTES = 8  # of a token id in a list
_CHARACTERS, _IDS = 256, 64  # fewer that are alike part no rows: a prefix has two KV blocks of 64 tokens or more


class _Lined(Protocol):
    """A row of any kind."""

    @property
    def line(self) -> int:
        """Return its number, from 1."""


PromptContent = str | list[int]  # text or token ids
_Item = TypeVar("_Item")
_Row = TypeVar("_Row", bound=_Lined)


def in_order(rows: Iterable[Row | RowError], kept: Callable[[int], int] | None) -> Iterator[Row | RowError]:
    """Return the rows of prompt files by their beginnings; see `by_beginning`."""
    return by_beginning(rows, _content_of, kept)


def by_beginning(
    rows: Iterable[_Row | RowError], content: Callable[[_Row], PromptContent], kept: Callable[[int], int] | None = None
) -> Iterator[_Row | RowError]:
    """Yield rows, in each window those whose prompts begin alike one after the other.

    Args:
        rows: Rows, and rows that cannot be used, which are passed on at once.
        content: Returns what is compared of a row.
        kept: Returns how many bytes are kept of a row beside it, by its line; None for none.
    """
    window: list[tuple[PromptContent, _Row]] = []
    size = 0
    for row in rows:
        if isinstance(row, RowError):
            yield row
            continue
        whole = content(row)
        window.append((whole, row))
        size += len(whole) * (1 if isinstance(whole, str) else _ID_BYTES) + (kept(row.line) if kept else 0)
        if len(window) >= _WINDOW_ROWS or size >= _WINDOW_BYTES:
            yield from grouped(window)
            window, size = [], 0
    yield from grouped(window)


def grouped(items: Sequence[tuple[PromptContent, _Item]]) -> Iterator[_Item]:
    """Yield items, those that begin alike one after the other; what has little in common stays in its order.

    Args:
        items: Each behind what it begins with. Texts are compared with texts alone, token ids with token ids.
    """
    texts = [item for item in items if isinstance(item[0], str)]
    ids = [item for item in items if not isinstance(item[0], str)]
    left = [part for part in (ids, texts) if part]
    while left:
        part = left.pop()
        parts = _parted(part) if len(part) > 2 else [part]
        if len(parts) > 1:
            left += reversed(parts)
        else:
            yield from (item for _, item in part)


def _parted(items: list[tuple[PromptContent, _Item]]) -> list[list[tuple[PromptContent, _Item]]]:
    """Return items by how they go on behind all that they have in common, in the order of the first of each."""
    wholes = [whole for whole, _ in items]
    common = _common(min(wholes), max(wholes))
    more = _CHARACTERS if isinstance(wholes[0], str) else _IDS
    parts: dict[str | tuple[int, ...], list[tuple[PromptContent, _Item]]] = {}
    for item in items:
        next_ones = item[0][common : common + more]
        parts.setdefault(next_ones if isinstance(next_ones, str) else tuple(next_ones), []).append(item)
    return list(parts.values())


def _common(one: PromptContent, other: PromptContent) -> int:
    """Return how many characters or token ids both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def of_messages(tools: object, messages: object) -> str:
    """Return a text for messages, whose prompts begin alike if it does; none for what JSON cannot hold."""
    try:
        return msgspec.json.encode([tools, messages]).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ""


def _content_of(row: Row) -> PromptContent:
    if row.messages is not None:
        return of_messages(row.chat.tools, row.messages)
    if row.prompt is not None:
        return row.prompt
    assert row.prompt_token_ids is not None, "a row has one of the three"
    return row.prompt_token_ids
