"""Reads a JSON array element by element, without having more of it in memory than one element."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

_CHUNK_BYTES = 1 << 18
_MAX_DEPTH = 10_000  # which no decoder takes
_AT_ELEMENTS = re.compile(rb'["{}\[\],]')
_IN_ELEMENT = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'["\\]')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_EMPTY = b","  # in place of an element that is missing; it is no JSON


class Readable(Protocol):
    """A binary file."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; nothing at the end of the file."""


def array_elements(file: Readable, most: int, most_skipped: int) -> Iterator[bytes | None]:
    """Yield the elements of an array as JSON, and None for each that is too long.

    Args:
        file: Holds the array and nothing else.
        most: Most bytes of an element.
        most_skipped: Most bytes of an element that is too long.

    Raises:
        ValueError: The file ends before the array does, or goes on after it, or an element is longer than that, or
            nested too deeply.
    """
    scanner = _Scanner(most, most_skipped)
    while chunk := file.read(_CHUNK_BYTES):
        yield from scanner.feed(chunk)
    if scanner.depth or not scanner.begun:
        raise ValueError("a JSON array without its end")


class _Scanner:
    """Finds the elements of an array in pieces of its text.

    Attributes:
        depth: Brackets that are open.
        begun: Whether the array has begun.
    """

    def __init__(self, most: int, most_skipped: int) -> None:
        self._most, self._most_skipped = most, most_skipped
        self.depth, self.begun = 0, False
        self._in_string = self._escaped = False
        self._element = bytearray()
        self._size = 0  # of the element so far
        self._after_comma = False

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """Yield the elements that end in the next piece."""
        at = start = 0  # where to look next, and where what is not yet in the element begins
        while at < len(chunk):
            if self.depth == 0:
                at = start = self._outside(chunk, at)
                continue
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            outside = _AT_ELEMENTS if self.depth == 1 else _IN_ELEMENT
            found = (_IN_STRING if self._in_string else outside).search(chunk, at)
            if found is None:
                break
            at, byte = found.end(), found[0]
            if self._in_string:
                self._in_string, self._escaped = byte != b'"', byte == b"\\"
            elif byte == b'"':
                self._in_string = True
            elif byte in b"{[":
                self.depth += 1
                if self.depth > _MAX_DEPTH:
                    raise ValueError("an element that is nested too deeply")
            elif byte in b"}]":
                self.depth -= 1
            if not self._in_string and ((byte == b"," and self.depth == 1) or self.depth == 0):
                self._add(chunk[start : at - 1])
                yield from self._ended(last=self.depth == 0)
                start = at
        if self.depth:
            self._add(chunk[start:])

    def _outside(self, chunk: bytes, at: int) -> int:
        """Return where to go on before the array or after it."""
        rest = chunk[at:].lstrip(b" \t\r\n\xef\xbb\xbf" if not self.begun else b" \t\r\n")
        if not rest:
            return len(chunk)
        if self.begun:
            raise ValueError("more after the end of the JSON array")
        if rest[:1] != b"[":
            raise ValueError("no JSON array")
        self.begun, self.depth = True, 1
        return len(chunk) - len(rest) + 1

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._most:
            self._element += piece
        elif self._size > self._most_skipped:
            raise ValueError(f"an element of more than {self._most_skipped >> 20} MiB")
        else:
            self._element.clear()

    def _ended(self, *, last: bool) -> Iterator[bytes | None]:
        """Yield the element that has ended, with a comma or as the last one."""
        text = bytes(self._element).strip()
        if self._size > self._most:
            yield None
        elif text or not last or self._after_comma:
            yield text or _EMPTY
        self._element.clear()
        self._size, self._after_comma = 0, not last


def count_elements(file: Readable) -> Iterator[int]:
    """Yield the number of objects and arrays in an array, after every piece of it, so that callers may rest."""
    count, depth, in_string, held = 0, 0, False, b""
    while chunk := file.read(_CHUNK_BYTES):
        text = (held + chunk).replace(b"\\\\", b"")
        held = b"\\" if text.endswith(b"\\") else b""
        parts = text.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2]).translate(None, _NOT_BRACKETS)
        in_string ^= len(parts) % 2 == 0
        for byte in outside:
            depth += 1 if byte in b"{[" else -1
            count += depth == 1 and byte in b"}]"
        yield count
