"""Prefetches prompts: one thread reads and tokenizes rows ahead of the scheduler, up to a bounded number of tokens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.requests.prompt import Prompt

_AHEAD_ROWS = 4096
_AHEAD_TOKENS = 1 << 17
_TOKEN_BYTES = 4  # bytes of kept columns that count as much as a token


class ErrorSink(Protocol):
    """Receives rows that cannot be used, such as the writer of the results."""

    def error(self, error: RowError) -> None:
        """Record a row that cannot be used."""


class PromptQueue(Protocol):
    """Where a desk takes its prompts from; see RowFeed for what the methods do."""

    @property
    def left(self) -> int | None:
        """Return how many rows are left, as far as is known; None if that is not known."""

    def peek(self) -> Prompt | None:
        """Return the next prompt, which stays in the queue, or None if there is none."""

    def at_hand(self) -> Prompt | None:
        """Return the next prompt if it can be had at once, which stays in the queue, or None."""

    def pop(self) -> Prompt:
        """Remove the next prompt and return it."""

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts back at the front of the queue, in their order."""

    def preview(self, count: int) -> tuple[list[Prompt], bool]:
        """Return up to `count` of the next prompts, and whether there are no more."""

    def close(self, seconds: float | None = None) -> None:
        """End the queue."""


class RowFeed:
    """A queue of the prompts of a job, in the order of the prompt files, filled ahead by a thread of its own.

    Args:
        rows: Prompts, and rows that cannot be used. Only the queue's thread iterates over them.
        errors: Receives the rows that cannot be used.
        size: Returns how many bytes are kept of a row, by its line; None if there are none.
    """

    def __init__(self, rows: Iterable[Prompt | RowError], errors: ErrorSink, size: Callable[[int], int] | None = None):
        self._errors, self._size = errors, size
        self._changed = threading.Condition()
        # Shared with the thread: the next four.
        self._read_ahead: deque[Prompt | RowError] = deque()
        self._tokens = 0  # weight of what is read ahead
        self._end: bool | BaseException = False
        self._closed = False
        self._next: deque[Prompt] = deque()
        self._thread = threading.Thread(target=self._read, args=(rows,), name="row-reader", daemon=True)
        self._thread.start()

    def peek(self) -> Prompt | None:
        """Return the next prompt, which stays in the queue, or None if there are no more.

        Raises:
            Exception: Any exception that reading the rows has raised.
        """
        return self._next[0] if self._fill(1) else None

    def at_hand(self) -> Prompt | None:
        """Return the next prompt if it has been taken from the thread, which stays in the queue, or None."""
        return self._next[0] if self._next else None

    def pop(self) -> Prompt:
        """Remove the next prompt and return it."""
        self._fill(1)
        return self._next.popleft()

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts back at the front of the queue, in their order."""
        self._next.extendleft(reversed(prompts))

    def preview(self, count: int) -> tuple[list[Prompt], bool]:
        """Return up to `count` of the next prompts, which stay in the queue, and whether there are no more."""
        more = self._fill(count + 1)
        return list(self._next)[:count], not more

    @property
    def left(self) -> int | None:
        """Return how many rows are left at most, or None while more may come."""
        with self._changed:
            return len(self._next) + len(self._read_ahead) if self._end else None

    def close(self, seconds: float | None = None) -> None:
        """End the thread, which may wait for its next row.

        Args:
            seconds: Seconds to wait for that; then the rows end here, and the thread ends when it has the row. None
                waits for any time.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            with self._changed:
                self._end = True
                self._changed.notify_all()

    def _fill(self, count: int) -> bool:
        """Return whether `count` prompts are at hand; wait for them unless the rows end before."""
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
        """Remove everything that has been read ahead and return it; wait for at least one row, or the end."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._read_ahead or self._end))
            if not self._read_ahead and isinstance(self._end, BaseException):
                raise self._end
            taken = list(self._read_ahead)
            self._read_ahead.clear()
            self._tokens = 0
            self._changed.notify_all()
        return taken

    def _has_room(self) -> bool:
        return len(self._read_ahead) < _AHEAD_ROWS and self._tokens < _AHEAD_TOKENS

    def _weight(self, item: Prompt | RowError) -> int:
        tokens = 0 if isinstance(item, RowError) else item.input_tokens if item.targets else len(item.token_ids)
        return tokens if self._size is None else tokens + self._size(item.line) // _TOKEN_BYTES

    def _read(self, rows: Iterable[Prompt | RowError]) -> None:
        end: bool | BaseException = True
        try:
            for item in rows:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._has_room())
                    if self._closed:
                        break
                    self._read_ahead.append(item)
                    self._tokens += self._weight(item)
                    self._changed.notify_all()
        except BaseException as error:  # raised again in the thread that asks for rows
            end = error
        with self._changed:
            self._end = end
            self._changed.notify_all()
