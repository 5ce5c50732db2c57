"""Calls of a model in this process: rows of a list, or of an iterator whose results are streamed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.given import KnownPrompts, read_row, text_of_row, with_params
from hpcdecode.data.prompts.order import grouped
from hpcdecode.data.prompts.rows import RowError, RowReader
from hpcdecode.data.results.collected import CollectedResults, RequestOutput, output_of, prompt_error, usable
from hpcdecode.data.results.result import Result
from hpcdecode.engine.capacity import require_capacity
from hpcdecode.engine.desk import Desk
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.stream import ResultStream, StreamClosed
from hpcdecode.errors import UserError
from hpcdecode.report.metrics import check_emptied
from hpcdecode.report.progress import NoProgress, Progress
from hpcdecode.requests.params import SamplingParams
from hpcdecode.system.signals import Signals

_CHECKPOINT_SECONDS = 3600.0  # of other S-ranks, which this process does not have
_READER_SECONDS = 1.0  # to wait for the next prompt of an iterator that is left


class Calls:
    """Runs one call of a model after another.

    Args:
        engine: The model, loaded.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._busy = threading.Lock()

    def run(
        self,
        fields: list[object],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        score: bool = False,
    ) -> list[tuple[list[Result], str | None, list[int]]]:
        """Return the results of each row, the text of its prompt and its tokens.

        Args:
            fields: Rows of a prompt file.
            params: Sampling parameters for all rows, those of each, or None for the defaults.
            use_tqdm: Show a progress bar.
            score: The rows are scored.

        Raises:
            PromptError: A row cannot be used.
            UserError: Another call is under way.
        """
        engine, tokenizer = self._engine, self._engine.tokenizer
        reader = RowReader(model=engine.options.model, score=score, adapters=tuple(engine.options.adapters))
        rows = usable(read_row(reader, number, *each) for number, each in enumerate(with_params(fields, params), 1))
        prompts = usable(tokenized(rows, tokenizer, engine.max_positions))
        results = CollectedResults()
        with self._alone():
            desk = Desk(grouped([(prompt.token_ids, prompt) for prompt in prompts]), results, tokenizer)
            try:
                require_capacity(engine, prompts, engine.scales(desk)[0])
                self._work(desk, _progress(use_tqdm, len(prompts)))
            finally:
                desk.feed.close()
        each = zip(rows, prompts, strict=True)
        return [(results.samples(row.line), text_of_row(row), prompt.token_ids) for row, prompt in each]

    def stream(
        self, fields: Iterator[tuple[object, SamplingParams]], total: int | None, use_tqdm: bool, errors: str
    ) -> Iterator[RequestOutput]:
        """Yield what becomes of rows as they finish; `total` of them, if that is known.

        Raises:
            PromptError: A row cannot be used, and `errors` is raise, not yield.
            UserError: Another call is under way.
        """
        engine, stream, known = self._engine, ResultStream(), KnownPrompts()
        reader = RowReader(model=engine.options.model, adapters=tuple(engine.options.adapters))
        with self._alone():
            rows = (read_row(reader, number, *each) for number, each in enumerate(fields, 1))
            prompts = tokenized(known.rows(rows), engine.tokenizer, engine.max_positions)
            desk = Desk(known.prompts(prompts), stream, engine.tokenizer)
            work, end = lambda: self._work(desk, _progress(use_tqdm, total)), lambda: desk.feed.close(_READER_SECONDS)
            for finished in stream.results(work, end):
                if not isinstance(finished, RowError):
                    yield output_of(finished, *known.take(finished[0].line))
                elif errors == "raise":
                    raise prompt_error(finished)
                else:
                    yield RequestOutput(finished.id, *known.take(finished.line), [], None, error=finished.reason)

    def _work(self, desk: Desk, progress: Progress) -> None:
        """Generate until the desk's rows are done, in any thread."""
        engine = self._engine
        torch.set_num_threads(engine.team.me.threads)
        try:
            scales = engine.scales(desk)
            check_emptied([engine.work(desk, scales, Signals(), progress, _CHECKPOINT_SECONDS)])
        except StreamClosed:
            progress.close(desk.done)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the model for one call."""
        if not self._busy.acquire(blocking=False):
            raise UserError(
                "expected one call at a time, and this model generates for another: take all results of its iterator, "
                "or close() that, first"
            )
        try:
            yield
        finally:
            self._busy.release()


def _progress(shown: bool, total: int | None) -> Progress:
    return Progress(bar=True, total=total) if shown else NoProgress()
