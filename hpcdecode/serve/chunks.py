"""Chunks of a streamed answer. Joined, they say what the answer at once would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpcdecode.data.results.openai_body import chat_finish_reason, chat_logprobs, completion_logprobs, usage
from hpcdecode.data.results.result import Result
from hpcdecode.engine.live import Update
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.prompt import Prompt
from hpcdecode.serve.answers import cached_tokens, choices_of, entries_of, head_of, message_of
from hpcdecode.serve.bodies import Asked
from hpcdecode.serve.detokenizer import TokenKinds
from hpcdecode.serve.parts import part_stream
from hpcdecode.serve.submission import PromptJob
from hpcdecode.serve.text_stream import TextStream

Chunk = dict[str, Any]


class ChunkWriter:
    """Makes the chunks of an answer.

    Args:
        asked: The request.
        jobs: Its prompts.
        kinds: Of the model's tokens.
    """

    def __init__(self, asked: Asked, jobs: Sequence[PromptJob], kinds: TokenKinds) -> None:
        self._asked, self._jobs, self._kinds = asked, jobs, kinds
        self._head = head_of(asked, chunk=True)
        self._tokens = [0] * len(jobs)  # generated, by prompt
        self._cached = 0  # tokens of prompts that are done
        make = _ChatChoice if asked.endpoint == "chat" else _TextChoice
        self._choices = {
            (index, sample): make(job.first + sample, job, job.ticket.prompt, kinds)
            for index, job in enumerate(jobs)
            if job.ticket is not None and not asked.scores
            for sample in range(job.samples)
        }

    def update(self, index: int, update: Update) -> Iterator[Chunk]:
        """Yield the chunks for new tokens of prompt `index`."""
        self._tokens[index] += len(update.token_ids)
        choice = self._choices[index, update.sample]
        for made in choice.feed(update.token_ids, update.logprobs):
            yield self._chunk([made])

    def end(self, index: int, results: Sequence[Result]) -> Iterator[Chunk]:
        """Yield the last chunks of prompt `index`."""
        self._cached += cached_tokens(results)
        if self._asked.scores or (self._asked.whole and self._asked.endpoint == "completions"):
            choices = list(choices_of(self._asked, self._jobs[index], results, self._kinds.text))
            self._tokens[index] = 0 if self._asked.scores else sum(len(r.token_ids) for r in results)
            for made in choices:
                yield self._chunk([made])
            return
        for result in results:
            choice = self._choices[index, result.sample]
            self._tokens[index] += len(result.token_ids) - choice.tokens
            for made in choice.end(result):
                yield self._chunk([made])

    def usage(self) -> Iterator[Chunk]:
        """Yield the chunk that has the usage, if it was asked for."""
        if self._asked.usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> Chunk:
        chunk = {**self._head, "choices": choices}
        if self._asked.running_usage:
            chunk["usage"] = self._usage()
        elif self._asked.usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        return usage(sum(len(job.token_ids) for job in self._jobs), sum(self._tokens), self._cached)


class _TextChoice:
    """A choice of a text completion.

    Attributes:
        tokens: Number of tokens that came.
    """

    def __init__(self, index: int, job: PromptJob, prompt: Prompt, kinds: TokenKinds) -> None:
        self._index, self._kinds, self._echo = index, kinds, job.text
        self._stream = TextStream(kinds, prompt.params)
        self._offset = self.tokens = 0

    def feed(self, token_ids: list[int], logprobs: Logprobs | None) -> Iterator[dict[str, Any]]:
        """Yield the new text and log-probabilities, if there are some."""
        held = self._logprobs(token_ids, logprobs)
        text, self._echo = self._echo + self._stream.feed(token_ids), ""
        if text or held:
            yield {"index": self._index, "text": text, "logprobs": held, "finish_reason": None}

    def end(self, result: Result) -> Iterator[dict[str, Any]]:
        """Yield what is left of the text, and the finish reason."""
        rest = result.token_ids[self.tokens :]
        held = self._logprobs(rest, result.logprobs and result.logprobs.part(self.tokens, len(result.token_ids)))
        text, self._echo = self._echo + self._stream.rest(result.text), ""
        yield {"index": self._index, "text": text, "logprobs": held, "finish_reason": result.finish_reason}

    def _logprobs(self, token_ids: list[int], logprobs: Logprobs | None) -> dict[str, Any] | None:
        self.tokens += len(token_ids)
        if logprobs is None or not token_ids:
            return None
        entries = entries_of(token_ids, logprobs, self._kinds.text)
        made = completion_logprobs(entries, self._offset)
        self._offset += sum(len(entry.text) for entry in entries)
        return made


class _ChatChoice:
    """A choice of a chat completion.

    Attributes:
        tokens: Number of tokens that came.
    """

    def __init__(self, index: int, job: PromptJob, prompt: Prompt, kinds: TokenKinds) -> None:
        self._index, self._kinds = index, kinds
        self._stream = part_stream(kinds, prompt)
        self._begun = False
        self.tokens = 0

    def feed(self, token_ids: list[int], logprobs: Logprobs | None) -> Iterator[dict[str, Any]]:
        """Yield the role at first, and what is decided of the message."""
        held = self._logprobs(token_ids, logprobs)
        yield from self._begin()
        delta = self._stream.feed(token_ids)
        if delta or held:
            yield self._choice(delta, held)

    def end(self, result: Result) -> Iterator[dict[str, Any]]:
        """Yield what is left of the message, and the finish reason."""
        yield from self._begin()
        rest = result.token_ids[self.tokens :]
        held = self._logprobs(rest, result.logprobs and result.logprobs.part(self.tokens, len(result.token_ids)))
        delta = self._stream.rest(message_of(result))
        yield self._choice(delta, held, chat_finish_reason(result.finish_reason, result.tool_calls))

    def _begin(self) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield self._choice({"role": "assistant", "content": ""}, None)

    def _choice(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, token_ids: list[int], logprobs: Logprobs | None) -> dict[str, Any] | None:
        self.tokens += len(token_ids)
        if logprobs is None or not token_ids:
            return None
        return chat_logprobs(entries_of(token_ids, logprobs, self._kinds.text))
