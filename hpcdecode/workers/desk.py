"""The lead S-rank's desk: rows go out to the lanes from here, and finished rows come back to it."""

from __future__ import annotations

import msgspec

from hpcdecode.data.feed import RowFeed
from hpcdecode.data.prompts import RowError
from hpcdecode.data.results import Result, ResultsWriter
from hpcdecode.data.tokens import Prompt, Tokenizer
from hpcdecode.schedule.sequence import Sequence


class Finished(msgspec.Struct, array_like=True):
    """A finished sequence on its way to the results; its text is made at the desk."""

    line: int
    id: str
    sample: int
    finish_reason: str
    prompt_tokens: int
    token_ids: list[int]

    @staticmethod
    def of(sequence: Sequence) -> Finished:
        prompt = sequence.prompt
        return Finished(
            line=prompt.line,
            id=prompt.id,
            sample=sequence.sample,
            finish_reason=sequence.finish_reason or "",
            prompt_tokens=sequence.prompt_length,
            token_ids=sequence.generated,
        )


class Desk:
    """Feed and sink of the lead's lanes; the other S-ranks reach it through `workers.remote`."""

    def __init__(self, feed: RowFeed, writer: ResultsWriter, tokenizer: Tokenizer):
        self.feed, self.writer, self.tokenizer = feed, writer, tokenizer
        self.rows = self.prompt_tokens = self.generated_tokens = 0

    def peek(self) -> Prompt | None:
        return self.feed.peek()

    def pop(self) -> Prompt:
        return self.feed.pop()

    def refuse(self, prompt: Prompt, reason: str) -> None:
        self.feed.refuse(prompt, reason)

    def finish(self, sequence: Sequence) -> None:
        self.record(Finished.of(sequence))

    def record(self, done: Finished) -> None:
        """Count a finished sequence, make its text and hand it to the results."""
        self.rows += 1
        self.prompt_tokens += done.prompt_tokens
        self.generated_tokens += len(done.token_ids)
        text = self.tokenizer.decode(done.token_ids)
        self.writer.add(Result(**msgspec.structs.asdict(done), text=text))

    def error(self, error: RowError) -> None:
        self.writer.error(error)
