"""Rows on their way to the injector: read and tokenised ahead by one thread, a bounded number at a time."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from hpcdecode.data.prompts import RowError
from hpcdecode.data.tokens import Prompt

_AHEAD = 1024  # rows


class ErrorSink(Protocol):
    def error(self, error: RowError) -> None: ...


class RowFeed:
    """Prompts of `rows` in order; rows that cannot be used go to `errors`. Rows are consumed by one thread."""

    def __init__(self, rows: Iterable[Prompt | RowError], errors: ErrorSink):
        self._errors = errors
        self._queue: queue.Queue = queue.Queue(_AHEAD)
        self._next: deque[Prompt] = deque()
        self._ended = self._closed = False
        self._thread = threading.Thread(target=self._read, args=(rows,), name="row-reader", daemon=True)
        self._thread.start()

    def peek(self) -> Prompt | None:
        """The next prompt, or None when there are no more. Raises what reading the rows raised."""
        return self._next[0] if self._fill(1) else None

    def pop(self) -> Prompt:
        self._fill(1)
        return self._next.popleft()

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt, `prompt`, and record why."""
        self._next.popleft()
        self._errors.error(RowError(prompt.line, prompt.id, reason))

    def preview(self, count: int) -> tuple[list[Prompt], bool]:
        """The next `count` prompts at most, which stay in the feed, and whether they are all that is left."""
        self._fill(count + 1)
        return list(self._next)[:count], self._ended and len(self._next) <= count

    def close(self) -> None:
        """Let the reader end."""
        self._closed = True
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _fill(self, count: int) -> bool:
        while len(self._next) < count and not self._ended:
            item = self._queue.get()
            if isinstance(item, Prompt):
                self._next.append(item)
            elif isinstance(item, RowError):
                self._errors.error(item)
            else:
                self._ended = True
                if item is not None:
                    raise item
        return len(self._next) >= count

    def _read(self, rows: Iterable[Prompt | RowError]) -> None:
        end: BaseException | None = None
        try:
            for item in rows:
                self._queue.put(item)
                if self._closed:
                    return
        except BaseException as error:  # handed to the thread that asks for rows
            end = error
        self._queue.put(end)
