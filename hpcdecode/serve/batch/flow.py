"""Rows of a batch in flight: some at a time go to the live desk, and what comes back goes to the results file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec

from hpcdecode.data.prompts.rows import RowError, row_error
from hpcdecode.data.results.result import Result
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.engine.live import FAILED, STOPPED, DeskClosed, DeskFull, Event
from hpcdecode.errors import RowProblem
from hpcdecode.requests.params import SamplingParams
from hpcdecode.serve.batch.record import BatchRecord, Ending
from hpcdecode.serve.batch.rows import BatchRow

EXPIRED = "the batch has expired before this request was done"
_DEFAULTS = SamplingParams()  # those of `hpcdecode generate`, so that results are its results
_MOST_BYTES = 64 << 20  # of lines in flight; a longer line goes alone
_WAIT_SECONDS, _FULL_SECONDS = 0.5, 0.1


class RowDesk(Protocol):
    """Takes rows, and tells what becomes of them."""

    def submit(
        self,
        fields: dict[str, Any],
        defaults: SamplingParams,
        *,
        client: str,
        drawn_as: int,
        receive: Callable[[Event], None],
    ) -> int:
        """Queue a row, and return the number that names it. `receive` is told its events, in any thread.

        Raises:
            RowProblem: It cannot be used.
            DeskFull: Too many rows wait.
            DeskClosed: No more rows are taken.
        """

    def cancel(self, line: int) -> None:
        """Drop a row, by the number that names it."""


class ServerEnds(Exception):
    """The batch goes on when the server is started again."""


class BatchFlow:
    """The rows of a batch, from its file to its results; used by one thread but for `wake` and `stop`.

    Args:
        record: The batch; its counts are kept here. Its status is set to `cancelling` by others.
        rows: Those that are not done.
        writer: The results.
        desk: Where rows go.
        share: Returns how many rows may be in flight.
    """

    def __init__(
        self,
        record: BatchRecord,
        rows: Iterator[BatchRow | RowError],
        writer: ResultsWriter,
        desk: RowDesk,
        share: Callable[[], int],
    ):
        self._record, self._rows, self._writer, self._desk, self._share = record, rows, writer, desk, share
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._flying: dict[int, BatchRow] = {}  # by the desk's number
        self._bytes = 0
        self._next: BatchRow | RowError | None = None
        self._ending: Ending = "completed"
        self._full = self._closed = self._stopped = False

    def wake(self) -> None:
        """Let it see that the batch's status has changed."""
        self._events.put(None)

    def stop(self) -> None:
        """Let it end at once; rows in flight begin anew when the server does."""
        self._stopped = True
        self.wake()

    def run(self) -> Ending:
        """Do all rows, and return what the batch becomes.

        Raises:
            ServerEnds: The server ends before.
            UserError: The disk refuses the results.
        """
        try:
            self._next = next(self._rows, None)
            while self._fill() or self._flying:
                self._wait()
                self._writer.tick()
            return self._ending
        finally:
            self._drop()

    def _fill(self) -> bool:
        """Bring rows to the desk; return whether there are more."""
        self._look()
        self._full = False
        while self._next is not None and not self._full and not self._closed and self._has_room(self._next):
            row = self._next
            if isinstance(row, RowError):
                self._fail(row)
            elif self._ending == "expired":
                self._fail(row_error(row.line, row.id, EXPIRED))
            elif not self._submit(row):
                break
            self._next = next(self._rows, None)
        return self._next is not None

    def _look(self) -> None:
        """See whether the server ends, or the batch is cancelled or has expired."""
        if self._stopped:
            self._take_all()
        if self._stopped or (self._closed and not self._flying):
            raise ServerEnds
        if self._ending == "completed":
            if self._record.status == "cancelling":
                self._ending, self._next, self._rows = "cancelled", None, iter(())
                self._drop()
            elif time.time() >= self._record.expires_at:
                self._ending = "expired"
                self._drop()

    def _drop(self) -> None:
        for number in self._flying:
            self._desk.cancel(number)

    def _has_room(self, row: BatchRow | RowError) -> bool:
        if isinstance(row, RowError) or not self._flying:
            return True
        return len(self._flying) < self._share() and self._bytes + row.size <= _MOST_BYTES

    def _submit(self, row: BatchRow) -> bool:
        """Bring a row to the desk; return whether it is done with: in flight, or of no use."""
        client, receive = f"batch of {self._record.owner}", self._events.put
        try:
            number = self._desk.submit(row.fields, _DEFAULTS, client=client, drawn_as=row.line, receive=receive)
        except RowProblem as e:
            self._fail(row_error(row.line, row.id, e))
            return True
        except DeskFull:
            self._full = True
            return False
        except DeskClosed:
            self._closed = True
            return False
        self._flying[number] = row
        self._bytes += row.size
        return True

    def _wait(self) -> None:
        """Take what has come from the desk; wait for the first of it."""
        try:
            self._take(self._events.get(timeout=_FULL_SECONDS if self._full else _WAIT_SECONDS))
        except Empty:
            return
        self._take_all()

    def _take_all(self) -> None:
        """Take what has come, without waiting."""
        with suppress(Empty):
            while True:
                self._take(self._events.get_nowait())

    def _take(self, event: Event | None) -> None:
        if isinstance(event, RowError):
            if (row := self._landed(event.line)) is None or self._ending == "cancelled":
                return
            if event.reason.startswith((STOPPED, FAILED)):  # it begins anew when the server does
                self._closed = True
                return
            self._fail(row_error(row.line, row.id, EXPIRED if self._ending == "expired" else event.reason))
        elif isinstance(event, list) and (row := self._landed(event[0].line)) is not None:
            self._record.completed += 1
            self._writer.add(*(self._own(result, row) for result in event))

    def _landed(self, number: int) -> BatchRow | None:
        row = self._flying.pop(number, None)
        self._bytes -= row.size if row else 0
        return row

    @staticmethod
    def _own(result: Result, row: BatchRow) -> Result:
        """Return a result under the line and id of the batch's file."""
        return msgspec.structs.replace(result, line=row.line, id=row.id)

    def _fail(self, error: RowError) -> None:
        self._record.failed += 1
        self._writer.error(error)
