"""Brings the rows of a request to the desk, and takes them back if nobody waits for them any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hpcdecode.data.prompts.fields import LORA
from hpcdecode.data.prompts.given import read_prompt
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.result import Result
from hpcdecode.requests.prompt import Prompt
from hpcdecode.serve.bodies import Asked
from hpcdecode.serve.context import Context
from hpcdecode.serve.errors import of_row, of_submission
from hpcdecode.serve.hub import Ended, Ticket


@dataclass
class PromptJob:
    """A prompt of a request.

    Attributes:
        token_ids: Tokens of the prompt.
        samples: Number of its choices.
        text: The prompt's text, if the answer echoes it.
        ticket: Of its row; None if nothing is to be computed for it.
        first: Index of its first choice.
        scored_alone: Whether log-probabilities are asked for of a prompt that is one token, which has none.
    """

    token_ids: list[int]
    samples: int
    text: str
    ticket: Ticket | None
    first: int
    scored_alone: bool = False

    async def results(self) -> Sequence[Result]:
        """Return the results of all samples, none if there is no row, or raise ApiError."""
        return [] if self.ticket is None else usable_end(await self.ticket.end())


def usable_end(ended: Ended) -> list[Result]:
    """Return the results of a row, or raise ApiError if it has none."""
    if isinstance(ended, RowError):
        raise of_row(ended)
    return ended


async def submit(asked: Asked, context: Context, client: str) -> list[PromptJob]:
    """Submit all rows of a request.

    Raises:
        ApiError: One cannot be used, or there is no room for it. No row is left then.
    """
    jobs: list[PromptJob] = []
    try:
        for index in range(len(asked.rows)):
            first = jobs[-1].first + jobs[-1].samples if jobs else 0
            jobs.append(await (_scored if asked.scores else _generated)(asked, index, context, client, first))
    except BaseException as error:
        leave(jobs, context)
        if isinstance(error, Exception):
            raise of_submission(error) from error
        raise
    return jobs


def leave(jobs: Sequence[PromptJob], context: Context) -> None:
    """Cancel the rows that have not ended."""
    for job in jobs:
        if job.ticket is not None:
            context.hub.leave(context.desk, job.ticket)


async def _generated(asked: Asked, index: int, context: Context, client: str, first: int) -> PromptJob:
    ticket = await context.hub.submit(
        context.desk,
        asked.rows[index],
        asked.defaults,
        client=client,
        drawn_as=index + 1,
        updates=asked.stream and not asked.whole,
    )
    prompt = ticket.prompt
    text = _echoed(asked, index, prompt.token_ids, context)
    return PromptJob(prompt.token_ids, prompt.params.samples, text, ticket, first)


async def _scored(asked: Asked, index: int, context: Context, client: str, first: int) -> PromptJob:
    """Submit a prompt whose own log-probabilities are asked for; it may fill the context."""
    prompt = await context.hub.read(partial(_read, asked, index, context))
    token_ids, logprobs = prompt.token_ids, prompt.params.logprobs
    ticket = None
    if logprobs is not None and len(token_ids) > 1:
        fields = {"prompt_token_ids": token_ids, "logprobs": logprobs, LORA: asked.rows[index]["body"].get(LORA)}
        ticket = await context.hub.submit(context.desk, fields, asked.defaults, client=client, score=True)
    text = _echoed(asked, index, token_ids, context)
    return PromptJob(token_ids, 1, text, ticket, first, logprobs is not None and ticket is None)


def _read(asked: Asked, index: int, context: Context) -> Prompt:
    positions = context.max_model_len + 1
    return read_prompt(
        index + 1, asked.rows[index], asked.defaults, context.tokenizer, positions, adapters=context.adapters
    )


def _echoed(asked: Asked, index: int, token_ids: list[int], context: Context) -> str:
    given = asked.prompts[index]
    if not asked.echo:
        return ""
    return given if isinstance(given, str) else context.tokenizer.decode(token_ids, skip_special_tokens=False)
