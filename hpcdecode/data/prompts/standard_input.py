"""Standard input, which is read once: what was read to look ahead is given again."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

MAX_AHEAD_BYTES = 64 << 20  # that are kept to be given again
_BUFFER_BYTES = 1 << 20


class FarEnough(Exception):
    """No more can be read ahead."""


class StandardInput(io.RawIOBase):
    """A stream whose bytes are kept while `ahead` is true, and given again after `rewind`.

    Closing it has no effect, so that several readers may follow each other.

    Args:
        source: The stream.

    Attributes:
        ahead: Whether bytes are kept.
    """

    def __init__(self, source: BinaryIO) -> None:
        self.source, self.ahead = source, False
        self._kept = bytearray()
        self._at = 0  # of the kept bytes, those that were given again

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at most as many bytes as the buffer has.

        Raises:
            FarEnough: More than MAX_AHEAD_BYTES would be kept.
        """
        data: bytes
        if self._at < len(self._kept):
            data = bytes(self._kept[self._at : self._at + len(buffer)])
            self._at += len(data)
        else:
            if self.ahead and len(self._kept) > MAX_AHEAD_BYTES:
                raise FarEnough
            data = self.source.read1(len(buffer))  # type: ignore[attr-defined]
            if self.ahead:
                self._kept += data
                self._at = len(self._kept)
            else:
                self._kept.clear()
                self._at = 0
        buffer[: len(data)] = data
        return len(data)

    def rewind(self) -> None:
        """Give the kept bytes again, and keep no more."""
        self.ahead, self._at = False, 0

    def close(self) -> None:
        """Do nothing."""


_current: StandardInput | None = None


def open_standard_input() -> io.BufferedReader:
    """Return a reader of standard input."""
    return io.BufferedReader(_stream(), _BUFFER_BYTES)


@contextmanager
def looking_ahead() -> Iterator[None]:
    """Give what is read from standard input within the block again after it."""
    stream = _stream()
    stream.ahead = True
    try:
        yield
    finally:
        stream.rewind()


def _stream() -> StandardInput:
    """Return the one stream of this process; another one if `sys.stdin` has been replaced."""
    global _current
    source: Any = sys.stdin.buffer
    if _current is None or _current.source is not source:
        _current = StandardInput(source)
    return _current
