"""Rows on their way to the scheduler: read and tokenised ahead by one thread, a bounded number of tokens at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.requests.prompt import Prompt

_AHEAD_ROWS = 4096
_AHEAD_TOKENS = 1 << 17


class ErrorSink(Protocol):
    def error(self, error: RowError) -> None: ...


class RowFeed:
    """Prompts of `rows` in order; rows that cannot be used go to `errors`. Rows are consumed by one thread."""

    def __init__(self, rows: Iterable[Prompt | RowError], errors: ErrorSink):
        self._errors = errors
        self._changed = threading.Condition()
        self._read_ahead: deque[Prompt | RowError] = deque()  # shared with the reader, as are the next three
        self._tokens = 0
        self._end: bool | BaseException = False
        self._closed = False
        self._next: deque[Prompt] = deque()
        self._thread = threading.Thread(target=self._read, args=(rows,), name="row-reader", daemon=True)
        self._thread.start()

    def peek(self) -> Prompt | None:
        """The next prompt, or None when there are no more. Raises what reading the rows raised."""
        return self._next[0] if self._fill(1) else None

    def pop(self) -> Prompt:
        """Take the next prompt."""
        self._fill(1)
        return self._next.popleft()

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Put `prompts` before the next one."""
        self._next.extendleft(reversed(prompts))

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt, `prompt`, and record why."""
        self._next.popleft()
        self._errors.error(RowError(prompt.line, prompt.id, reason))

    def preview(self, count: int) -> tuple[list[Prompt], bool]:
        """The next `count` prompts at most, which stay in the feed, and whether they are all that is left."""
        more = self._fill(count + 1)
        return list(self._next)[:count], not more

    def close(self) -> None:
        """End the reader."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _fill(self, count: int) -> bool:
        while len(self._next) < count:
            for item in self._take():
                if isinstance(item, RowError):
                    self._errors.error(item)
                else:
                    self._next.append(item)
            if self._end and not self._read_ahead:
                break
        return len(self._next) >= count

    def _take(self) -> list[Prompt | RowError]:
        """All that has been read; waits until there is something, or the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._read_ahead or self._end)
            if not self._read_ahead and isinstance(self._end, BaseException):
                raise self._end
            taken = list(self._read_ahead)
            self._read_ahead.clear()
            self._tokens = 0
            self._changed.notify_all()
        return taken

    def _has_room(self) -> bool:
        return len(self._read_ahead) < _AHEAD_ROWS and self._tokens < _AHEAD_TOKENS

    def _read(self, rows: Iterable[Prompt | RowError]) -> None:
        end: bool | BaseException = True
        try:
            for item in rows:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._has_room())
                    if self._closed:
                        break
                    self._read_ahead.append(item)
                    self._tokens += 0 if isinstance(item, RowError) else len(item.token_ids)
                    self._changed.notify_all()
        except BaseException as error:  # raised again in the thread that asks for rows
            end = error
        with self._changed:
            self._end = end
            self._changed.notify_all()
