"""How the other S-ranks reach the lead's desk: they ask for rows ahead of need, and hand in what is finished."""

from __future__ import annotations

from collections import deque

from mpi4py import MPI

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.result import Result
from hpcdecode.engine.desk import Desk, RankReport, error_of, result_of
from hpcdecode.mpi.message import post, receive, send
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence import Request

_REPORT, _ROWS, _STOP = 1, 2, 3  # message tags
_ROWS_A_MESSAGE = 16


class Clients:
    """The lead's end. comm: the S-ranks, of which the lead is rank 0.

    It never waits for a message of its own to be taken: the client may wait for a large report to be.
    """

    def __init__(self, desk: Desk, comm: MPI.Intracomm):
        self.desk, self.comm = desk, comm
        self.open = set(range(1, comm.size))
        self.stopping = False
        self.tokens = 0  # of the rows handed in
        self._sent: list[MPI.Request] = []
        self._unfinished: dict[int, list[Unfinished]] = {}  # by client, as last reported

    def serve(self, *, stop: bool = False) -> None:
        """Take the reports that have arrived and answer them; waits for none. stop: let all end at their next step."""
        if stop and not self.stopping:
            self.stopping = True
            for client in self.open:
                self._sent.append(post(self.comm, client, _STOP, None))
        self._sent = [request for request in self._sent if not request.Test()]
        status = MPI.Status()
        while self.open and self.comm.Iprobe(tag=_REPORT, status=status):
            report = receive(self.comm, status.source, _REPORT, RankReport)
            for samples in report.finished:
                self.desk.record(samples)
                self.tokens += sum(len(done.token_ids) for done in samples)
            for error in report.errors:
                self.desk.error(error)
            if report.unfinished is not None:
                self._unfinished[status.source] = report.unfinished
            if report.ask > 0:
                self._sent.append(post(self.comm, status.source, _ROWS, self._rows(report.ask)))
            elif report.ask < 0:
                self.open.remove(status.source)

    def unfinished(self) -> list[Unfinished]:
        """Return the sequences that the clients had in flight at their last reports of them."""
        return [u for sequences in self._unfinished.values() for u in sequences]

    def _rows(self, count: int) -> list[Prompt]:
        rows: list[Prompt] = []
        while len(rows) < count and not self.stopping and self.desk.peek() is not None:
            rows.append(self.desk.pop())
        return rows


class RemoteDesk:
    """Feed and sink of an S-rank that is not the lead. An empty answer to a question for rows is their end."""

    def __init__(self, comm: MPI.Intracomm, tokenizer: Tokenizer):
        self.comm, self.tokenizer = comm, tokenizer
        self._rows: deque[Prompt] = deque()
        self._finished: list[list[Result]] = []
        self._errors: list[RowError] = []
        self._asked = self._ended = False

    def peek(self) -> Prompt | None:
        """Return the next prompt, or None if there are no more; ask the lead for more ahead of need."""
        if not self._asked and not self._ended and len(self._rows) < _ROWS_A_MESSAGE // 2:
            self._report(_ROWS_A_MESSAGE)
            self._asked = True
        while not self._rows and self._asked:
            self._take_answer()
        return self._rows[0] if self._rows else None

    def pop(self) -> Prompt:
        """Take the next prompt."""
        return self._rows.popleft()

    def refuse(self, prompt: Prompt, reason: str) -> None:
        """Drop the next prompt and record why."""
        self._rows.popleft()
        self._errors.append(RowError(prompt.line, prompt.id, reason))

    def finish(self, request: Request) -> None:
        """Take a request whose sequences are all finished; hand in some at a time."""
        if (error := error_of(request)) is not None:
            self._errors.append(error)
            return
        self._finished.append([result_of(sequence, self.tokenizer) for sequence in request.sequences])
        if len(self._finished) >= _ROWS_A_MESSAGE:
            self._report(0)

    def last_report(self, unfinished: list[Unfinished]) -> RankReport:
        """Return what `close` would send."""
        return RankReport(-1, self._finished, self._errors, unfinished)

    def told_to_stop(self) -> bool:
        """Return whether the lead said to stop."""
        return self.comm.Iprobe(0, _STOP)

    def checkpoint(self, unfinished: list[Unfinished]) -> None:
        """Hand in what is done, and what is in flight."""
        self._report(0, unfinished)

    def close(self, unfinished: list[Unfinished]) -> None:
        """Hand in what is done and what was in flight, and end."""
        if self._asked:
            self._take_answer()
        self._report(-1, unfinished)

    def _take_answer(self) -> None:
        rows = receive(self.comm, 0, _ROWS, list[Prompt])
        self._rows += rows
        self._ended, self._asked = not rows, False

    def _report(self, ask: int, unfinished: list[Unfinished] | None = None) -> None:
        send(self.comm, 0, _REPORT, RankReport(ask, self._finished, self._errors, unfinished))
        self._finished, self._errors = [], []
