"""The routes that generate text: `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response

from hpcdecode.engine.live import Update
from hpcdecode.errors import RowProblem
from hpcdecode.serve.answers import answer_of
from hpcdecode.serve.bodies import Asked, asked_of, json_object
from hpcdecode.serve.chunks import ChunkWriter
from hpcdecode.serve.context import Context
from hpcdecode.serve.detokenizer import TokenKinds
from hpcdecode.serve.errors import CLIENT_GONE, ApiError, unusable
from hpcdecode.serve.event_stream import DONE, ClientGone, EventStream, event, while_connected
from hpcdecode.serve.failures import errors
from hpcdecode.serve.files.owners import client_of
from hpcdecode.serve.schema import chat_body, completion_body, json_body
from hpcdecode.serve.submission import PromptJob, leave, submit


class News(NamedTuple):
    """What is new of a prompt of a request: updates, and whether that is all of it."""

    number: int
    updates: list[Update]
    ended: bool


class TextAnswers:
    """Answers requests for text.

    Args:
        context: Of the server.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._kinds = context, TokenKinds(context.tokenizer)

    async def answer(self, request: Request, endpoint: str) -> Response:
        """Return the answer to a request, streamed or at once."""
        try:
            asked = asked_of(json_object(await request.body()), endpoint, self._context)
        except RowProblem as problem:
            raise unusable(problem) from problem
        client = client_of(request, self._context.options.api_keys)
        try:
            work = self._streamed if asked.stream else self._at_once
            return await while_connected(request.receive, work(asked, client))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)

    async def _at_once(self, asked: Asked, client: str) -> Response:
        jobs = await submit(asked, self._context, client)
        try:
            results = [await job.results() for job in jobs]
        finally:
            leave(jobs, self._context)
        body = msgspec.json.encode(answer_of(asked, jobs, results, self._kinds.text))
        return Response(body, media_type="application/json")

    async def _streamed(self, asked: Asked, client: str) -> Response:
        """Return a stream once there is something to send, so that a row that cannot run has an error's status."""
        jobs = await submit(asked, self._context, client)
        try:
            news = _news(jobs)
            first = await anext(news, None)
            if first is not None and first.ended and not first.updates:
                await jobs[first.number].results()
        except BaseException:
            leave(jobs, self._context)
            raise
        events = self._events(asked, jobs, first, news)
        return EventStream(events, lambda: leave(jobs, self._context), self._context.stall_seconds)

    async def _events(
        self, asked: Asked, jobs: Sequence[PromptJob], first: News | None, news: AsyncGenerator[News, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream: those of each step together."""
        writer = ChunkWriter(asked, jobs, self._kinds)
        try:
            if first is not None:
                yield await _written(writer, jobs, first)
            async for each in news:
                yield await _written(writer, jobs, each)
            yield b"".join(map(event, writer.usage())) + DONE
        except ApiError as error:  # the status has been sent
            yield event(error.body) + DONE
        finally:
            await news.aclose()


async def _written(writer: ChunkWriter, jobs: Sequence[PromptJob], news: News) -> bytes:
    """Return the events for what is new of a prompt."""
    chunks = [event(chunk) for update in news.updates for chunk in writer.update(news.number, update)]
    if news.ended:
        chunks += [event(chunk) for chunk in writer.end(news.number, await jobs[news.number].results())]
    return b"".join(chunks)


async def _news(jobs: Sequence[PromptJob]) -> AsyncGenerator[News, None]:
    """Yield what is new of each prompt, until all have ended."""
    tickets = {index: job.ticket for index, job in enumerate(jobs) if job.ticket is not None}
    for index in range(len(jobs)):
        if index not in tickets:
            yield News(index, [], True)
    if len(tickets) == 1:  # without a task for each token
        ((index, ticket),) = tickets.items()
        ended = False
        while not ended:
            updates, ended = await ticket.news(), ticket.ended is not None
            yield News(index, updates, ended)
        return
    waiting = {asyncio.create_task(ticket.news()): index for index, ticket in tickets.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda t: waiting[t]):
                index = waiting.pop(task)
                ended = tickets[index].ended is not None
                if not ended:
                    waiting[asyncio.create_task(tickets[index].news())] = index
                yield News(index, task.result(), ended)
    finally:
        for task in waiting:
            task.cancel()


def generation_router(context: Context) -> APIRouter:
    """Return the routes that generate text."""
    router, generation = APIRouter(), TextAnswers(context)

    failures = errors(400, 401, 404, 413, 429, 500, 503)

    @router.post("/v1/completions", openapi_extra=json_body(completion_body(context.names)), responses=failures)
    async def completions(request: Request) -> Response:
        """Complete a text."""
        return await generation.answer(request, "completions")

    @router.post("/v1/chat/completions", openapi_extra=json_body(chat_body(context.names)), responses=failures)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await generation.answer(request, "chat")

    return router
