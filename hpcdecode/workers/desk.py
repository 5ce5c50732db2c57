"""The lead S-rank's desk: rows go out to the lanes from here, and finished rows come back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from hpcdecode.data.feed import RowFeed
from hpcdecode.data.logprobs import Logprobs
from hpcdecode.data.prompts import RowError
from hpcdecode.data.results import Result
from hpcdecode.data.tokens import Prompt, Tokenizer, Unfinished
from hpcdecode.errors import UserError
from hpcdecode.schedule.sequence import Sequence


class Finished(msgspec.Struct, array_like=True):
    """A finished sequence on its way to the results."""

    line: int
    id: str
    sample: int
    finish_reason: str
    prompt_tokens: int
    resumed: int  # of the generated tokens, those of an earlier run
    queued_at: float
    first_token_at: float
    finished_at: float
    token_ids: list[int]
    text: str
    logprobs: Logprobs | None
    cumulative_logprob: float  # NaN where it is not known
    prompt_token_ids: list[int]  # where it has the next
    prompt_logprobs: Logprobs | None

    @staticmethod
    def of(sequence: Sequence, tokenizer: Tokenizer) -> Finished:
        prompt = sequence.prompt
        return Finished(
            line=prompt.line,
            id=prompt.id,
            sample=sequence.sample,
            finish_reason=sequence.finish_reason or "",
            prompt_tokens=len(prompt.token_ids),
            resumed=sequence.resumed,
            queued_at=sequence.queued_at,
            first_token_at=sequence.first_token_at,
            finished_at=sequence.finished_at,
            token_ids=sequence.generated,
            text=sequence.text(tokenizer.decode),
            logprobs=sequence.logprobs,
            cumulative_logprob=sequence.logprobs.total if sequence.logprobs else sequence.cumulative_logprob,
            prompt_token_ids=[] if sequence.prompt_logprobs is None else prompt.token_ids,
            prompt_logprobs=sequence.prompt_logprobs,
        )


class Writer(Protocol):
    """Where results go: a file (`ResultsWriter`), or memory. See there for what they mean."""

    error_count: int
    unfinished: Callable[[], list[Unfinished]]

    def add(self, *samples: Result) -> None: ...

    def error(self, e: RowError) -> None: ...

    def tick(self) -> None: ...


class Desk:
    """Feed and sink of the lead's lanes; the other S-ranks reach it through `workers.remote`.

    max_errors: rows that may be unusable; one more raises UserError where it is read or refused.
    """

    def __init__(
        self,
        rows: Iterable[Prompt | RowError],
        writer: Writer,
        tokenizer: Tokenizer,
        max_errors: int | None = None,
    ):
        self.feed = RowFeed(rows, self)
        self.writer, self.tokenizer, self.max_errors = writer, tokenizer, max_errors
        self.rows = self.prompt_tokens = self.generated_tokens = 0

    def peek(self) -> Prompt | None:
        return self.feed.peek()

    def pop(self) -> Prompt:
        return self.feed.pop()

    def refuse(self, prompt: Prompt, reason: str) -> None:
        self.feed.refuse(prompt, reason)

    def finish(self, family: list[Sequence]) -> None:
        self.record([Finished.of(sequence, self.tokenizer) for sequence in family])

    def record(self, samples: list[Finished]) -> None:
        """Count a finished row and hand it to the results."""
        self.rows += 1
        self.prompt_tokens += samples[0].prompt_tokens
        self.generated_tokens += sum(len(done.token_ids) - done.resumed for done in samples)
        fields = [msgspec.structs.asdict(done) for done in samples]
        self.writer.add(*(Result(**{k: v for k, v in f.items() if k != "resumed"}) for f in fields))

    def error(self, error: RowError) -> None:
        """Record a row that cannot be used."""
        self.writer.error(error)
        if self.max_errors is not None and self.writer.error_count > self.max_errors:
            raise UserError(
                f"{self.writer.error_count} rows cannot be used and --max-errors allows {self.max_errors}; the last is "
                f"line {error.line}: {error.reason} (all are under /errors of the results; the same command "
                "with more --max-errors goes on from here)"
            )
