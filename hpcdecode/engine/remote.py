"""How the other S-ranks reach the lead's desk: they ask for rows ahead of need, and hand in what is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from mpi4py import MPI

from hpcdecode.data.prompts.dealer import Dealer, PromptList
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.result import Result
from hpcdecode.engine.desk import Desk, RankReport, error_of, results_of
from hpcdecode.mpi import ulfm
from hpcdecode.mpi.message import post, receive, send
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence import CANCELLED, Request, SequenceState
from hpcdecode.requests.updates import updates_of

_REPORT, _ROWS, _STOP, _CANCEL = 1, 2, 3, 4  # message tags
_RESULTS_A_MESSAGE = 16  # rows


class Rows(msgspec.Struct, array_like=True):
    """The lead's answer to a question for rows: some for each lane, and whether they are the last."""

    prompts: list[list[Prompt]]
    last: bool


class Clients:
    """The lead's end.

    Args:
        desk: of the lead.
        comm: the S-ranks, of which the lead is rank 0.
        batches: B of every S-rank.
        lost: told of a client that is lost and the number of its rows, which others will do; None if its loss ends
            the work of all.

    It never waits for a message of its own to be taken: the client may wait for a large report to be.
    """

    def __init__(
        self, desk: Desk, comm: MPI.Intracomm, batches: Sequence[int], lost: Callable[[int, int], None] | None = None
    ):
        self.desk, self.comm, self._lost = desk, comm, lost
        self.open = set(range(1, comm.size))
        self._expected = dict(enumerate(batches[1:], 1))  # sequences of clients that have not asked yet
        self._lanes = 1  # of the client that has most
        self.stopping = False
        self.tokens = 0  # of the rows handed in
        self._sent: list[tuple[int, MPI.Request]] = []  # to clients
        self._asks: dict[int, RankReport] = {}  # questions for rows that have no answer yet, by client
        self._held: dict[int, set[int]] = {client: set() for client in self.open}  # lines that they work on
        self._unfinished: dict[int, list[Unfinished]] = {}  # by client, as last reported

    def serve(self, *, stop: bool = False) -> None:
        """Take the reports that have arrived and answer them; waits for none. stop: let all end at their next step."""
        try:
            self._serve(stop=stop)
        except MPI.Exception:
            if self._lost is None or not self._dissolve(self._lost):
                raise

    def cancel(self, line: int) -> None:
        """Tell the client that works on a row to end it."""
        for client, lines in self._held.items():
            if line in lines:
                self._post(client, _CANCEL, line)

    def unfinished(self) -> list[Unfinished]:
        """Return the sequences that the clients had in flight at their last reports of them."""
        return [u for sequences in self._unfinished.values() for u in sequences]

    def _serve(self, *, stop: bool) -> None:
        if stop and not self.stopping:
            self.stopping = True
            for client in self.open:
                self._post(client, _STOP, None)
        self._sent = [(client, request) for client, request in self._sent if not request.Test()]
        status = MPI.Status()
        while self.open and self.comm.Iprobe(tag=_REPORT, status=status):
            self._take(status.source, receive(self.comm, status.source, _REPORT, RankReport))
        for client, report in list(self._asks.items()):
            self._answer(client, report)

    def _take(self, client: int, report: RankReport) -> None:
        """Take a report, but for one that a lost client had sent: its rows are given out again."""
        if client not in self.open:
            return
        for samples in report.finished:
            self.desk.record(samples)
            self.tokens += sum(len(done.token_ids) for done in samples)
            self._held[client].discard(samples[0].line)
        for error in report.errors:
            self.desk.error(error)
            self._held[client].discard(error.line)
        self.desk.tell(report.updates)
        if report.unfinished is not None:
            self._unfinished[client] = report.unfinished
        if report.asks is None:
            self.open.remove(client)
        elif report.asks:
            self._asks[client] = report

    def _answer(self, client: int, report: RankReport) -> None:
        """Answer a question for rows, unless there are none now and some may come."""
        assert report.asks is not None, "expected a question"
        self._lanes = max(self._lanes, len(report.asks))
        rows = self._rows(client, report.asks, ahead=report.ahead)
        if any(rows.prompts) or rows.last:
            del self._asks[client]
            self._held[client].update(prompt.line for of_lane in rows.prompts for prompt in of_lane)
            self._post(client, _ROWS, rows)

    def _post(self, client: int, tag: int, message: object) -> None:
        self._sent.append((client, post(self.comm, client, tag, message)))

    def _dissolve(self, tell: Callable[[int, int], None]) -> bool:
        """Give the rows of clients that are newly lost out again; return whether there are any."""
        lost = [client for client in ulfm.lost(self.comm) if client in self._held]
        for client in lost:
            self.open.discard(client)
            self._expected.pop(client, None)
            self._asks.pop(client, None)
            self._sent = [(to, request) for to, request in self._sent if to != client]
            rows = self._held.pop(client)
            for lane in range(self._lanes):
                self.desk.drop(self._taker(client, lane))
            self.desk.take_back([RankReport(None, [], [], self._unfinished.pop(client, []))], rows)
            tell(client, len(rows))
        return bool(lost)

    def _rows(self, client: int, asks: list[int], *, ahead: bool) -> Rows:
        """Give out rows of as many sequences as the lanes of a client ask for, or what there is.

        Of the last rows of a job, a client that asks ahead of need gets its share of those that no one else waits for.
        """
        self._expected.pop(client, None)
        left, count = self.desk.left, sum(asks)
        if left is not None and (ahead or self.desk.live):
            count = min(count, -(-(left - sum(self._expected.values())) // (len(self.open) + 1)))
        rows: list[list[Prompt]] = [[] for _ in asks]
        while count > 0 and not self.stopping:
            lane = max(range(len(asks)), key=asks.__getitem__)
            taker = self._taker(client, lane)
            if self.desk.peek(taker) is None:
                break
            rows[lane].append(self.desk.pop(taker))
            asks[lane] -= rows[lane][-1].sequences
            count -= rows[lane][-1].sequences
        return Rows(rows, self.stopping or self.desk.exhausted())

    def _taker(self, client: int, lane: int) -> int:
        """Return the number of a client's lane at the desk, where the lead's own count from 0."""
        return -(client + lane * self.comm.size)


class RemoteDesk:
    """Feed and sink of an S-rank that is not the lead.

    It asks ahead of need, so that its lanes do not wait for the lead, but for no more than a micro-batch: rows that
    wait here could run elsewhere. Each lane asks for itself: the lead deals rows that begin alike to one.

    Args:
        comm: the S-ranks, of which the lead is rank 0.
        tokenizer: of the model.
        batches: B of every lane.
        injection: sequences that enter a lane together, of a schedule that lets them in by portions; else 0.
        live: the lead's desk is a live one; finished rows are handed in at once.
    """

    def __init__(
        self, comm: MPI.Intracomm, tokenizer: Tokenizer, batches: Sequence[int], injection: int, live: bool = False
    ):
        self.comm, self.tokenizer, self._batches = comm, tokenizer, batches
        self._at_once = 1 if live else _RESULTS_A_MESSAGE  # rows
        self._ahead = [injection] * len(batches)
        self._in_flight = [0] * len(batches)  # sequences of rows that run
        self._dealer = Dealer(PromptList())  # holds the rows that wait here
        self._finished: list[list[Result]] = []
        self._errors: list[RowError] = []
        self._cancelled: set[int] = set()  # lines, also of rows that run or have just ended
        self._asked = self._ended = False

    def sampled(self, sequences: Sequence[SequenceState]) -> None:
        """Tell the lead the new tokens of the sequences of a step."""
        if updates := updates_of(sequences):
            send(self.comm, 0, _REPORT, RankReport([], [], [], None, updates=updates))

    def take_cancelled(self) -> Iterator[int]:
        """Yield the rows that the lead says nobody wants any more; those that wait here end when their turn comes."""
        while self.comm.Iprobe(0, _CANCEL):
            line = receive(self.comm, 0, _CANCEL, int)
            self._cancelled.add(line)
            yield line

    def peek(self, taker: int = 0) -> Prompt | None:
        """Return a lane's next prompt, or None if there is none yet; wait for it only if nothing else is to do."""
        self._look()
        while (self._ended or self._dealer.hand(taker)) and (prompt := self._dealer.peek(taker)) is not None:
            if prompt.line not in self._cancelled:
                return prompt
            self.refuse(prompt, CANCELLED, taker)
        if self._ended:
            return None
        self._ahead[taker] = min(2 * self._ahead[taker], self._batches[taker])  # sequences end earlier than expected
        return None

    def at_hand(self, taker: int = 0) -> Prompt | None:
        """Return a lane's next prompt if it is here, or None; the lead is not asked."""
        return self._dealer.at_hand(taker)

    def exhausted(self) -> bool:
        """Return whether the lead has no more rows."""
        self._look()
        return self._ended and not self._dealer.waiting

    def pop(self, taker: int = 0) -> Prompt:
        """Take a lane's next prompt."""
        prompt = self._dealer.pop(taker)
        self._in_flight[taker] += prompt.sequences
        return prompt

    def refuse(self, prompt: Prompt, reason: str, taker: int = 0) -> None:
        """Drop a lane's next prompt and record why."""
        self._dealer.pop(taker)
        self._fail(RowError(prompt.line, prompt.id, reason))

    def finish(self, request: Request) -> None:
        """Take a request whose sequences are all finished; hand in some at a time."""
        self._in_flight[request.lane] -= request.prompt.sequences
        if (error := error_of(request)) is not None:
            self._fail(error)
            return
        self._finished.append(results_of(request, self.tokenizer))
        if len(self._finished) >= self._at_once:
            self._report([])

    def last_report(self, unfinished: list[Unfinished]) -> RankReport:
        """Return what `close` would send."""
        return RankReport(None, self._finished, self._errors, unfinished)

    def told_to_stop(self) -> bool:
        """Return whether the lead said to stop."""
        return self.comm.Iprobe(0, _STOP)

    def checkpoint(self, unfinished: list[Unfinished]) -> None:
        """Hand in what is done, and what is in flight."""
        self._report([], unfinished)

    def close(self, unfinished: list[Unfinished]) -> None:
        """Hand in what is done and what was in flight, and end."""
        if self._asked:
            self._take_answer()
        self._report(None, unfinished)

    def _look(self) -> None:
        """Ask for rows, and take an answer that is here or must come first."""
        self._ask()
        while self._asked and (self._answered() or not (self._dealer.waiting or any(self._in_flight))):
            self._take_answer()
            self._ask()

    def _ask(self) -> None:
        """Ask for what a micro-batch of a lane lacks, or for what has room in it at once."""
        if self._asked or self._ended:
            return
        waiting = [sum(prompt.sequences for prompt in self._dealer.hand(lane)) for lane in range(len(self._batches))]
        each = zip(self._ahead, self._batches, self._in_flight, waiting, strict=True)
        wants = [(ahead or batch - running) - held for ahead, batch, running, held in each]
        if any(want > ahead // 2 for want, ahead in zip(wants, self._ahead, strict=True)):
            self._report([max(want, 0) for want in wants])
            self._asked = True

    def _fail(self, error: RowError) -> None:
        """Take a row that has no result; hand it in at once if someone waits for it."""
        self._errors.append(error)
        if self._at_once == 1:
            self._report([])

    def _answered(self) -> bool:
        return self.comm.Iprobe(0, _ROWS)

    def _take_answer(self) -> None:
        answer = receive(self.comm, 0, _ROWS, Rows)
        for lane, prompts in enumerate(answer.prompts):
            self._dealer.give(lane, prompts)
        self._cancelled &= {p.line for lane in range(len(self._batches)) for p in self._dealer.hand(lane)}
        self._ended, self._asked = answer.last, False

    def _report(self, asks: list[int] | None, unfinished: list[Unfinished] | None = None) -> None:
        report = RankReport(asks, self._finished, self._errors, unfinished, ahead=any(self._in_flight))
        send(self.comm, 0, _REPORT, report)
        self._finished, self._errors = [], []
