"""Prompts that come from clients while the engine runs: a queue in which the clients take turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from hpcdecode.requests.prompt import Prompt


class DeskFull(Exception):
    """As many rows wait as may."""


class DeskClosed(Exception):
    """No more rows are taken."""


class LiveFeed:
    """A queue of prompts. `put` and `end` may be called by any thread, all else by the engine's.

    Args:
        most: Rows that may wait at once.
    """

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._back: deque[Prompt] = deque()  # that were given back; they come first
        self._clients: dict[str, deque[Prompt]] = {}  # that have rows here; the first one's turn is next
        self._count, self._ended = 0, False

    def put(self, prompt: Prompt, client: str) -> None:
        """Append a prompt to those of its client.

        Raises:
            DeskFull: As many rows wait as may.
            DeskClosed: The queue has ended.
        """
        with self._lock:
            if self._ended:
                raise DeskClosed
            if self._count >= self._most:
                raise DeskFull
            self._clients.setdefault(client, deque()).append(prompt)
            self._count += 1

    def end(self) -> None:
        """Take no more prompts."""
        with self._lock:
            self._ended = True

    @property
    def ended(self) -> bool:
        """Return whether no more prompts come."""
        return self._ended

    @property
    def queued(self) -> int:
        """Return how many rows wait."""
        return self._count

    @property
    def left(self) -> int | None:
        """Return how many rows wait; others may come."""
        return self._count

    def peek(self) -> Prompt | None:
        """Return the next prompt, which stays in the queue, or None if there is none now."""
        with self._lock:
            return self._next()[0] if self._count else None

    at_hand = peek

    def pop(self) -> Prompt:
        """Remove the next prompt and return it; the next client's turn comes."""
        with self._lock:
            queue = self._next()
            prompt = queue.popleft()
            self._count -= 1
            if queue is not self._back:
                client = next(iter(self._clients))
                rest = self._clients.pop(client)
                if rest:
                    self._clients[client] = rest
            return prompt

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts back at the front of the queue, in their order."""
        with self._lock:
            self._back.extendleft(reversed(prompts))
            self._count += len(prompts)

    def remove(self, line: int) -> Prompt | None:
        """Remove a prompt that waits and return it; None if it does not wait."""
        with self._lock:
            for client, queue in [("", self._back), *self._clients.items()]:
                found = next((prompt for prompt in queue if prompt.line == line), None)
                if found is not None:
                    queue.remove(found)
                    self._count -= 1
                    if not queue:
                        self._clients.pop(client, None)
                    return found
        return None

    def preview(self, count: int) -> tuple[list[Prompt], bool]:
        """Return no prompts: what comes is not known, and it is not waited for."""
        return [], False

    def close(self, seconds: float | None = None) -> None:
        """End the queue."""
        self.end()

    def _next(self) -> deque[Prompt]:
        return self._back or next(iter(self._clients.values()))
