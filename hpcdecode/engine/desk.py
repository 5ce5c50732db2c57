"""The lead S-rank's desk: rows go out to the lanes from here, and finished rows come back to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from hpcdecode.data.prompts.dealer import Dealer
from hpcdecode.data.prompts.feed import PromptQueue, RowFeed
from hpcdecode.data.prompts.rows import RowError, row_error
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.result import Result
from hpcdecode.engine.row_errors import RowErrors
from hpcdecode.engine.scored import scored_results
from hpcdecode.errors import UserError
from hpcdecode.report.metrics import RowCounts
from hpcdecode.requests.output_parser import Parsed
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.shortcuts import NO_SHORTCUTS
from hpcdecode.requests.updates import Update


def result_of(sequence: SequenceState, tokenizer: Tokenizer) -> Result:
    """Return what the results file is to say of a finished sequence."""
    prompt, times = sequence.prompt, sequence.times
    parsed = _parsed(sequence, tokenizer)
    return Result(
        line=prompt.line,
        id=prompt.id,
        sample=sequence.sample,
        text=sequence.text(tokenizer.decode),
        finish_reason=sequence.finish_reason or "",
        prompt_tokens=len(prompt.token_ids),
        token_ids=sequence.generated,
        queued_at=times.queued,
        first_token_at=times.first_token,
        finished_at=times.finished,
        logprobs=sequence.logprobs,
        cumulative_logprob=sequence.logprobs.total if sequence.logprobs else sequence.cumulative_logprob,
        prompt_token_ids=[] if sequence.prompt_logprobs is None else prompt.token_ids,
        prompt_logprobs=sequence.prompt_logprobs,
        resumed=sequence.earlier,
        reasoning=parsed and parsed.reasoning,
        content=parsed and parsed.content,
        tool_calls=parsed and parsed.tool_calls,
        adapter=prompt.lora,
        shortcuts=sequence.request.shortcuts,
    )


def _parsed(sequence: SequenceState, tokenizer: Tokenizer) -> Parsed | None:
    """Return the parts of a text, or None if texts are left whole. Their markers may be special tokens."""
    if tokenizer.output_parser is None:
        return None
    prompt, decode = sequence.prompt, partial(tokenizer.decode, skip_special_tokens=False)
    text, place = sequence.text(lambda ids, _: decode(ids)), f"{prompt.draw_line}-{sequence.sample}"
    return tokenizer.output_parser(text, prompt.token_ids, place, decode, prompt.params.skip_special_tokens)


def results_of(request: Request, tokenizer: Tokenizer) -> list[Result]:
    """Return what the results file is to say of a finished request: of its samples, or of what was scored."""
    if request.prompt.targets:
        return scored_results(request, tokenizer)
    return [result_of(sequence, tokenizer) for sequence in request.sequences]


def error_of(request: Request) -> RowError | None:
    """Return why a request has no result, or None."""
    error = request.error
    return None if error is None else row_error(request.prompt.line, request.prompt.id, error)


class RankReport(msgspec.Struct, array_like=True):
    """From an S-rank to the lead: what is done since the last report, and how many rows it asks for.

    Attributes:
        asks: sequences that each of its lanes asks for; nothing asks for none, and None is the S-rank's last report.
        finished: rows, with all their samples.
        errors: rows that could not be used.
        unfinished: all sequences in flight; None in most reports.
        ahead: whether the S-rank has other sequences to work on.
        updates: tokens of rows in flight that are told as they come.
    """

    asks: list[int] | None
    finished: list[list[Result]]
    errors: list[RowError]
    unfinished: list[Unfinished] | None
    ahead: bool = False
    updates: list[Update] = []


class Writer(Protocol):
    """Where results go: a file (`ResultsWriter`), or memory. See there for what they mean."""

    error_count: int
    unfinished: Callable[[], list[Unfinished]]

    def add(self, *samples: Result) -> None:
        """Take the samples of a finished request."""

    def error(self, e: RowError) -> None:
        """Take a row that cannot be used."""

    def tick(self) -> None:
        """Make durable what is there, if it is time."""


class Desk:
    """Feed and sink of the lead's lanes; the other S-ranks reach it through `engine.remote`.

    Lanes are takers 0, 1, ... of rows, other S-ranks -1, -2, ... Rows that come while the engine works go to any.

    max_errors: rows that may be unusable; one more raises UserError where it is read or refused.
    size: bytes that are kept of a row, by its line; None for none.
    told: tells the user about rows that cannot be used; None tells nothing.
    live: whether rows come while the engine works.
    sampled: takes note of the sequences that a step gave tokens, or None.
    """

    live = False
    sampled: Callable[[Sequence[SequenceState]], None] | None = None

    def __init__(
        self,
        rows: Iterable[Prompt | RowError],
        writer: Writer,
        tokenizer: Tokenizer,
        max_errors: int | None = None,
        size: Callable[[int], int] | None = None,
        told: RowErrors | None = None,
    ):
        self.told = told
        self.feed = self._open_feed(rows, size)
        self._dealer = Dealer(self.feed)
        self.writer, self.tokenizer, self.max_errors = writer, tokenizer, max_errors
        self.rows = self.prompt_tokens = self.generated_tokens = 0
        self.shortcuts = NO_SHORTCUTS  # of all finished rows
        self._out: dict[int, Prompt] = {}  # rows that were given out and have not come back, by line
        self._left: dict[int, list[Unfinished]] = {}  # of rows that were given out before, by line

    def peek(self, taker: int = 0) -> Prompt | None:
        """Return the next prompt of a taker, or None if there are no more."""
        return self.feed.peek() if self.live else self._dealer.peek(taker)

    def at_hand(self, taker: int = 0) -> Prompt | None:
        """Return the next prompt of a taker if it can be had at once, or None."""
        return self.feed.peek() if self.live else self._dealer.at_hand(taker)

    def exhausted(self) -> bool:
        """Return whether there are no more prompts."""
        return not self._dealer.waiting and self.feed.peek() is None

    def pop(self, taker: int = 0) -> Prompt:
        """Give the next prompt of a taker out."""
        prompt = self.feed.pop() if self.live else self._dealer.pop(taker)
        self._out[prompt.line] = prompt
        return prompt

    def drop(self, taker: int) -> None:
        """Have others take what would be a taker's."""
        self.feed.give_back(self._dealer.drop(taker))

    @property
    def left(self) -> int | None:
        """Return how many rows are left at most, or None while more may come."""
        left = self.feed.left
        return None if left is None else left + self._dealer.waiting

    def tell(self, updates: Iterable[Update]) -> None:
        """Tell the tokens of rows in flight to who asked for them."""

    def take_cancelled(self) -> Iterable[int]:
        """Return the rows in flight that nobody wants any more, each once."""
        return ()

    def unfinished(self) -> list[Unfinished]:
        """Return what rows had generated when they were taken back, for those that do not run again yet."""
        return [u for sequences in self._left.values() for u in sequences]

    def last_report(self, unfinished: list[Unfinished]) -> RankReport:
        """Return the report of the lead's own S-rank, which has handed in all that is done."""
        return RankReport(None, [], [], unfinished)

    @property
    def rows_left(self) -> int:
        """Rows that were taken back and are not done yet."""
        return len(self._left)

    def take_back(self, reports: Iterable[RankReport], lines: Collection[int] | None = None) -> None:
        """Take rows that were given out to give them out again, but for those that S-ranks' last reports finish.

        They go on with what they have generated.

        Args:
            reports: the last of the S-ranks whose rows they are.
            lines: of the rows; None for all that are out.
        """
        newest: dict[int, dict[int, Unfinished]] = {}
        for report in reports:
            for samples in report.finished:
                if samples[0].line in self._out:  # the loss may have kept its S-rank from seeing that it had arrived
                    self.record(samples)
            for error in report.errors:
                if error.line in self._out:
                    self.error(error)
            for u in report.unfinished or ():
                newest.setdefault(u.line, {})[u.sample] = u
        back = {line: prompt for line, prompt in sorted(self._out.items()) if lines is None or line in lines}
        for line, prompt in back.items():
            before = {u.sample: u for u in prompt.unfinished}
            after = before | newest.get(line, {})
            self.generated_tokens += sum(len(u.token_ids) for u in after.values())
            self.generated_tokens -= sum(len(u.token_ids) for u in before.values())
            prompt.unfinished = self._left[line] = list(after.values())
            del self._out[line]
        self.feed.give_back(list(back.values()))

    def refuse(self, prompt: Prompt, reason: str, taker: int = 0) -> None:
        """Drop the next prompt of a taker and record why."""
        self.pop(taker)
        self.error(RowError(prompt.line, prompt.id, reason))

    def finish(self, request: Request) -> None:
        """Take a request whose sequences are all finished."""
        if (error := error_of(request)) is not None:
            self.error(error)
            return
        self.record(results_of(request, self.tokenizer))

    def record(self, samples: list[Result]) -> None:
        """Count a finished row and hand it to the results."""
        self._returned(samples[0].line)
        self.rows += 1
        self.prompt_tokens += samples[0].prompt_tokens
        self.shortcuts += samples[0].shortcuts
        self.generated_tokens += sum(len(done.token_ids) - done.resumed for done in samples)
        self.writer.add(*samples)

    def error(self, error: RowError) -> None:
        """Record a row that cannot be used."""
        self._returned(error.line)
        self.writer.error(error)
        if self.told is not None:
            self.told.add(error)
        if self.max_errors is not None and self.writer.error_count > self.max_errors:
            raise UserError(
                f"{self.writer.error_count} rows cannot be used and --max-errors allows {self.max_errors}; the last is "
                f"line {error.line}: {error.reason} (all are under /errors of the results; the same command "
                "with more --max-errors goes on from here)"
            )

    @property
    def done(self) -> int:
        """Rows with results, and those that cannot be used, with those that earlier runs could not use."""
        return self.rows + self.writer.error_count

    @property
    def counts(self) -> RowCounts:
        """Return what there is to report of the rows so far."""
        tokens = self.prompt_tokens, self.generated_tokens
        return RowCounts(self.rows, self.writer.error_count, *tokens, self.shortcuts)

    def _open_feed(self, rows: Iterable[Prompt | RowError], size: Callable[[int], int] | None) -> PromptQueue:
        return RowFeed(rows, self, size)

    def _returned(self, line: int) -> None:
        self._out.pop(line, None)
        self._left.pop(line, None)
