"""Results while an engine works: it runs in a thread of its own, and rows come to the caller as they finish."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Iterator

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.result import Result
from hpcdecode.requests.prompt import Unfinished

MOST_WAITING = 256  # finished rows that wait for the caller; the engine waits before it makes more
_CLOSED_SECONDS = 0.1  # after which an engine that waits for the caller sees that it has gone

Finished = list[Result] | RowError


class StreamClosed(Exception):
    """The caller wants no more results."""


class ResultStream:
    """Writer of results that hands them to another thread.

    Attributes:
        error_count: Rows that could not be used.
        unfinished: As every writer has it; nothing is kept of sequences in flight.
    """

    def __init__(self) -> None:
        self.error_count = 0
        self.unfinished: Callable[[], list[Unfinished]] = list
        self._queue: queue.Queue[Finished | BaseException | None] = queue.Queue(MOST_WAITING)  # None is the end
        self._closed = threading.Event()

    def add(self, *samples: Result) -> None:
        """Hand over the samples of a finished row."""
        self._put(sorted(samples, key=lambda r: r.sample))

    def error(self, e: RowError) -> None:
        """Hand over a row that cannot be used."""
        self.error_count += 1
        self._put(e)

    def tick(self) -> None:
        """Raise StreamClosed if the caller wants no more."""
        if self._closed.is_set():
            raise StreamClosed

    def results(self, work: Callable[[], None], ended: Callable[[], None]) -> Iterator[Finished]:
        """Yield rows as they finish, with their samples.

        Args:
            work: What the engine does, in a thread of its own, with this object as writer. What it raises is raised
                here, after the rows that were finished before.
            ended: Lets the prompts end, before this waits for the thread; also called if the caller takes no more rows.
        """
        thread = threading.Thread(target=self._run, args=(work,), name="engine", daemon=True)

        def end() -> None:
            self._closed.set()
            ended()
            thread.join()

        atexit.register(end)  # Python must not end while the thread computes
        thread.start()
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            end()
            atexit.unregister(end)

    def _run(self, work: Callable[[], None]) -> None:
        end: BaseException | None = None
        try:
            work()
        except BaseException as error:  # raised again in the caller's thread
            end = error
        try:
            self._put(end)
        except StreamClosed:
            return

    def _put(self, item: Finished | BaseException | None) -> None:
        while True:
            self.tick()
            try:
                self._queue.put(item, timeout=_CLOSED_SECONDS)
                return
            except queue.Full:
                continue
